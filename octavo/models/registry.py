"""The native architectures: one table. What is not here runs through the transformers backend."""

import importlib
from typing import Any

# architecture as in config.json -> (module, class)
NATIVE: dict[str, tuple[str, str]] = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("llama", "LlamaForCausalLM"),
    "SmolLM3ForCausalLM": ("llama", "LlamaForCausalLM"),
    "Qwen2ForCausalLM": ("llama", "LlamaForCausalLM"),
    "GraniteForCausalLM": ("llama", "LlamaForCausalLM"),
    "SeedOssForCausalLM": ("llama", "LlamaForCausalLM"),
    "CwmForCausalLM": ("llama", "LlamaForCausalLM"),
    "MinistralForCausalLM": ("llama", "LlamaForCausalLM"),
    "Ministral3ForCausalLM": ("llama", "LlamaForCausalLM"),
    "Llama4ForCausalLM": ("llama4", "Llama4ForCausalLM"),
    "ArceeForCausalLM": ("apertus", "ArceeForCausalLM"),
    "ApertusForCausalLM": ("apertus", "ApertusForCausalLM"),
    "Apertus1p5TextForCausalLM": ("apertus", "ApertusForCausalLM"),
    "HeliumForCausalLM": ("ernie", "Ernie45ForCausalLM"),
    "HunYuanDenseV1ForCausalLM": ("hunyuan", "HunyuanForCausalLM"),
    "HunYuanMoEV1ForCausalLM": ("hunyuan", "HunyuanMoeForCausalLM"),
    "Phi3ForCausalLM": ("phi3", "Phi3ForCausalLM"),
    "GemmaForCausalLM": ("gemma", "GemmaForCausalLM"),
    "Gemma2ForCausalLM": ("gemma", "Gemma2ForCausalLM"),
    "Gemma3ForCausalLM": ("gemma", "Gemma3ForCausalLM"),
    "VaultGemmaForCausalLM": ("gemma", "VaultGemmaForCausalLM"),
    "Gemma4ForCausalLM": ("gemma4", "Gemma4ForCausalLM"),
    "Gemma4UnifiedForCausalLM": ("gemma4", "Gemma4ForCausalLM"),
    "GlmForCausalLM": ("glm", "GlmForCausalLM"),
    "Glm4ForCausalLM": ("glm", "Glm4ForCausalLM"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3ForCausalLM"),
    "CohereForCausalLM": ("cohere", "CohereForCausalLM"),
    "Cohere2ForCausalLM": ("cohere", "Cohere2ForCausalLM"),
    **{
        name: ("gpt", name)
        for name in (
            "GPT2LMHeadModel",
            "GPTBigCodeForCausalLM",
            "GPTJForCausalLM",
            "GPTNeoXForCausalLM",
            "NemotronForCausalLM",
            "OPTForCausalLM",
            "PhiForCausalLM",
        )
    },
    "BloomForCausalLM": ("layernorm", "BloomForCausalLM"),
    "FalconForCausalLM": ("layernorm", "FalconForCausalLM"),
    "MptForCausalLM": ("layernorm", "MptForCausalLM"),
    "OlmoForCausalLM": ("layernorm", "OlmoForCausalLM"),
    "PhimoeForCausalLM": ("phimoe", "PhimoeForCausalLM"),
    "StableLmForCausalLM": ("layernorm", "StableLmForCausalLM"),
    "Starcoder2ForCausalLM": ("layernorm", "Starcoder2ForCausalLM"),
    "Qwen2MoeForCausalLM": ("qwen_moe", "Qwen2MoeForCausalLM"),
    "Qwen3MoeForCausalLM": ("qwen_moe", "Qwen3MoeForCausalLM"),
    "MellumForCausalLM": ("qwen_moe", "Qwen3MoeForCausalLM"),
    "MixtralForCausalLM": ("mixtral", "MixtralForCausalLM"),
    "GraniteMoeForCausalLM": ("mixtral", "GraniteMoeForCausalLM"),
    "MiniMaxM2ForCausalLM": ("olmo", "MiniMaxM2ForCausalLM"),
    "Olmo2ForCausalLM": ("olmo", "Olmo2ForCausalLM"),
    "Olmo3ForCausalLM": ("olmo", "Olmo3ForCausalLM"),
    "OlmoeForCausalLM": ("olmo", "OlmoeForCausalLM"),
    "Exaone4ForCausalLM": ("olmo", "Exaone4ForCausalLM"),
    "GptOssForCausalLM": ("gpt_oss", "GptOssForCausalLM"),
    "Ernie4_5ForCausalLM": ("ernie", "Ernie45ForCausalLM"),
    "Ernie4_5_MoeForCausalLM": ("ernie", "Ernie45MoeForCausalLM"),
    "Glm4MoeForCausalLM": ("glm4_moe", "Glm4MoeForCausalLM"),
    "Dots1ForCausalLM": ("glm4_moe", "Glm4MoeForCausalLM"),
    "SolarOpenForCausalLM": ("glm4_moe", "Glm4MoeForCausalLM"),
    "DeepseekV2ForCausalLM": ("deepseek", "DeepseekV2ForCausalLM"),
    "DeepseekV3ForCausalLM": ("deepseek", "DeepseekV3ForCausalLM"),
    "DeepseekV32ForCausalLM": ("deepseek_v32", "DeepseekV32ForCausalLM"),
    "GlmMoeDsaForCausalLM": ("deepseek_v32", "GlmMoeDsaForCausalLM"),
    "Glm4MoeLiteForCausalLM": ("deepseek", "DeepseekV3ForCausalLM"),
    "YoutuForCausalLM": ("deepseek", "DeepseekV3ForCausalLM"),
    "MambaForCausalLM": ("mamba", "MambaForCausalLM"),
    "FalconMambaForCausalLM": ("mamba", "FalconMambaForCausalLM"),
    "Mamba2ForCausalLM": ("mamba", "Mamba2ForCausalLM"),
    "BambaForCausalLM": ("bamba", "BambaForCausalLM"),
    "FalconH1ForCausalLM": ("falcon_h1", "FalconH1ForCausalLM"),
    "GraniteMoeHybridForCausalLM": ("granite_hybrid", "GraniteHybridForCausalLM"),
    "GraniteMoeSharedForCausalLM": ("granite_hybrid", "GraniteHybridForCausalLM"),
    "JambaForCausalLM": ("jamba", "JambaForCausalLM"),
    "Lfm2ForCausalLM": ("lfm2", "Lfm2ForCausalLM"),
    "Lfm2MoeForCausalLM": ("lfm2", "Lfm2MoeForCausalLM"),
    "MiniMaxForCausalLM": ("minimax", "MiniMaxForCausalLM"),
    "NemotronHForCausalLM": ("nemotron_h", "NemotronHForCausalLM"),
    "Qwen3NextForCausalLM": ("qwen3_next", "Qwen3NextForCausalLM"),
    "Qwen3_5ForCausalLM": ("qwen3_next", "Qwen35ForCausalLM"),
    "Qwen3_5MoeForCausalLM": ("qwen3_next", "Qwen35MoeForCausalLM"),
    "Zamba2ForCausalLM": ("zamba2", "Zamba2ForCausalLM"),
    "RwkvForCausalLM": ("rwkv", "RwkvForCausalLM"),
}

# Models of text and more, whose decoder is run alone -> the architecture that it is.
TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Gemma4UnifiedForConditionalGeneration": "Gemma4UnifiedForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
NATIVE.update({name: NATIVE[text] for name, text in TEXT_PARTS.items()})

# Encoders, likewise. What is neither here nor above makes vectors and classes through transformers' own modules.
ENCODERS: dict[str, tuple[str, str]] = {
    **{
        f"{family}{kind}": ("bert", "BertEncoder")
        for family in ("Bert", "Roberta", "XLMRoberta", "Camembert", "Electra", "DistilBert", "MPNet")
        for kind in ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
    },
    "BertForPreTraining": ("bert", "BertEncoder"),
    "ElectraForPreTraining": ("bert", "BertEncoder"),
    "HF_ColBERT": ("bert", "BertEncoder"),
    **{
        f"ModernBert{kind}": ("modernbert", "ModernBertEncoder")
        for kind in ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
    },
}

# Encoder-decoder models, likewise. There is nobody to run others.
ENCODER_DECODERS: dict[str, tuple[str, str]] = {
    "T5ForConditionalGeneration": ("t5", "T5ForConditionalGeneration"),
    "MT5ForConditionalGeneration": ("t5", "T5ForConditionalGeneration"),
    "UMT5ForConditionalGeneration": ("t5", "T5ForConditionalGeneration"),
    "BartForConditionalGeneration": ("bart", "BartForConditionalGeneration"),
    "MBartForConditionalGeneration": ("bart", "BartForConditionalGeneration"),
    "PLBartForConditionalGeneration": ("bart", "BartForConditionalGeneration"),
    "MarianMTModel": ("bart", "BartForConditionalGeneration"),
    "PegasusForConditionalGeneration": ("bart", "BartForConditionalGeneration"),
    "M2M100ForConditionalGeneration": ("bart", "BartForConditionalGeneration"),
    "BlenderbotForConditionalGeneration": ("bart", "BartForConditionalGeneration"),
}


def model_class(architecture: str, model_impl: str, *, pools: bool = False) -> type[Any]:
    """The class for an architecture under `model_impl` ("octavo" or "transformers"); `pools`: it makes no text."""
    if model_impl == "transformers" and pools:
        module, name = "transformers_pooling", "TransformersPooling"
    elif model_impl == "transformers":
        module, name = "transformers_backend", "TransformersForCausalLM"
    else:
        module, name = {**NATIVE, **ENCODERS, **ENCODER_DECODERS}[architecture]
    found = getattr(importlib.import_module(f"octavo.models.{module}"), name)
    if model_impl != "transformers" and architecture in TEXT_PARTS:
        return importlib.import_module("octavo.models.text_part").text_part(found)
    return found
