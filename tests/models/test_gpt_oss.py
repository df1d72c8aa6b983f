"""GPT-OSS's own checkpoint format: experts in MXFP4, interleaved, blocks and scales apart."""

import json

import safetensors.torch
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from octavo.models.gpt_oss import decode_mxfp4
from tests.models.harness import check_against_transformers, random_checkpoint

SHAPE = {"head_dim": 16, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 16}


def random_blocks(out: int, width: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of three experts."""
    blocks = torch.randint(0, 256, (3, out, width // 32, 16), generator=rng, dtype=torch.uint8)
    return blocks, torch.randint(121, 126, (3, out, width // 32), generator=rng, dtype=torch.uint8)


def test_decoding_equals_transformers():
    blocks, scales = random_blocks(10, 64, torch.Generator().manual_seed(0))
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(decode_mxfp4(blocks, scales, torch.float32), expected.transpose(1, 2))


def test_packed_checkpoint_equals_transformers(tmp_path):
    oracle = random_checkpoint("gpt_oss", SHAPE, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    rng = torch.Generator().manual_seed(0)
    for name, parameter in oracle.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        blocks, scales = random_blocks(parameter.shape[2], parameter.shape[1], rng)
        parameter.data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    check_against_transformers(tmp_path, oracle, "octavo")
