"""Pools of an H200 predicted before the launch, from what the card's memory is, against what vLLM 0.30.0 logged there."""

import pytest
from conftest import ROOT, guide

from fieldbook import budget, inventory, memory, params

# Live boxes need their machine; the recorded run's captured outputs tell the card.
USABLE_BYTES = 150_109_880_320


def predicted(file, **engine):
    asked = params.load(ROOT / "params" / f"{file}.yml")
    asked = asked.model_copy(update={"engine": asked.engine.model_copy(update=engine)})
    spec = memory.model_spec(asked.model.name)
    return asked, spec, memory.pool(asked, spec, [spec.num_hidden_layers], gpus=budget.Gpus((USABLE_BYTES,)))


@pytest.mark.parametrize(
    "file, engine, logged, available_gib",
    [
        ("h200-x1", {}, 909_728, 111.05),
        # The first boot, with nothing compiled yet.
        ("h200-x1", {}, 907_856, 110.82),
        ("h200-x1-dsa", {}, 8_958_272, 120.84),
        ("h200-x1-dsa", {"kv_cache_dtype": "fp8_ds_mla"}, 15_162_624, 120.48),
        # Other boots of the same: 129,718,122,496 and 129,334,343,680 bytes.
        ("h200-x1-dsa", {}, 8_955_904, 120.81),
        ("h200-x1-dsa", {"kv_cache_dtype": "fp8_ds_mla"}, 15_158_720, 120.45),
    ],
)
def test_a_pool_is_known_before_the_launch_and_exact_after_it(file, engine, logged, available_gib):
    asked, spec, before = predicted(file, **engine)
    assert before.pool_tokens == pytest.approx(logged, rel=0.01)
    # From the KV space of the log the arithmetic leaves nothing but the log's own two decimals.
    after, rounding = memory.pool_after(asked, spec, [spec.num_hidden_layers], {0: available_gib}, None)
    assert abs(after.pool_tokens - logged) <= rounding


def test_the_card_alone_gives_what_the_guide_says():
    text = guide("hardware")
    assert predicted("h200-x1")[2].pool_tokens == 910_512 and "a pool of 910,512 tokens" in text
    assert predicted("h200-x1-dsa")[2].pool_tokens == 8_950_656 and "8,950,656 tokens" in text
    assert predicted("h200-x1-dsa", kv_cache_dtype="fp8_ds_mla")[2].pool_tokens == 15_194_752 and "15,194,752 with an 8-bit cache" in text


def test_the_card_is_read_as_cuda_has_it():
    """NVML's total is 616 MiB more than what CUDA calls the total, and vLLM counts from that."""
    box = inventory.read_captured(ROOT / "data" / "boxes" / "h200-x1-replay")
    assert box.gpus[0].memory_total_bytes == 143_771 * 2**20
    assert box.gpus[0].memory_usable_bytes == pytest.approx(USABLE_BYTES, abs=2**20)
