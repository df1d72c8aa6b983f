"""The text part of models that also see or hear: their decoders alone. What their checkpoints hold besides is left unread."""

from octavo.config.hf import HFConfig
from octavo.layers.causal_lm import CausalLM

_DECODER_NAMES = {r"^language_model\.(?=model\.|lm_head\.)": "", r"^model\.language_model\.": "model."}
_OTHER_PARTS = (
    r"^(model\.)?(vision_tower|vision_model|vision_embedder|embed_vision|audio_tower|embed_audio|multi_modal_projector|"
    r"visual|mtp)\."
)


def text_part(decoder: type[CausalLM]) -> type[CausalLM]:
    """`decoder` for configurations and checkpoints that have it as a part."""

    class TextPart(decoder):  # type: ignore[misc, valid-type]
        def __init__(self, cfg: HFConfig):
            text = cfg.text()
            is_tied = cfg.tie_word_embeddings or text.tie_word_embeddings
            more = {"max_model_len": cfg.get("max_model_len"), "tie_word_embeddings": is_tied}
            super().__init__(HFConfig({**text.data, **more}))
            self.renames: dict[str, str] = {**_DECODER_NAMES, **self.renames}
            self.ignored: tuple[str, ...] = (*self.ignored, _OTHER_PARTS)

    return TextPart
