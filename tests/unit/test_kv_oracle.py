"""KV accounting against vLLM 0.30's own functions: its cache specs, its grouping, its block counts and the token count it logs.

The specs are built by vLLM's layer classes from the same numbers; what fieldbook.kv says is compared with what get_kv_cache_configs returns.
"""

import contextlib
import logging
import random
from types import SimpleNamespace

import pytest
from kv_builders import FAMILIES, GIB, ask_fieldbook, case_of, flash_next, glm_5_3, qwen3_5_27b, random_case, smollm2

from fieldbook import kv, patches
from fieldbook.errors import BadInput
from fieldbook.patches import site, store

vllm = pytest.importorskip("vllm")
if not vllm.__version__.startswith("0.30."):
    pytest.skip("the oracle speaks for vLLM 0.30", allow_module_level=True)

import torch  # noqa: E402
import vllm.config.vllm as config_module  # noqa: E402
from vllm.model_executor.layers.attention.attention import Attention as VllmAttention  # noqa: E402
from vllm.model_executor.layers.attention.mla_attention import MLAAttention  # noqa: E402
from vllm.model_executor.layers.mamba.abstract import MambaBase  # noqa: E402
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator  # noqa: E402
from vllm.model_executor.models import ModelRegistry  # noqa: E402
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache  # noqa: E402
from vllm.platforms.interface import Platform  # noqa: E402
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_capacity, get_kv_cache_configs, get_kv_cache_groups  # noqa: E402
from vllm.v1.kv_cache_interface import CircularBufferSpec, MambaSpec, MLAAttentionSpec  # noqa: E402
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.uint8, "fp8_ds_mla": torch.uint8}
TORCH["nvfp4_ds_mla"] = torch.uint8


class Backend(AttentionBackend):
    """A backend that takes blocks of multiples of 16, as FlashAttention does."""

    @staticmethod
    def get_supported_kernel_block_sizes():
        return [MultipleOf(16)]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """No log, and no current config: the oracle's configs are plain namespaces."""
    monkeypatch.setattr(kv_cache_utils.logger, "warning", lambda *a, **k: None)
    monkeypatch.setattr(config_module, "set_current_vllm_config", lambda _: contextlib.nullcontext())
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def plain(**values):
    return SimpleNamespace(**values)


def vllm_config(spec, case):
    """The part of a VllmConfig that the KV planner reads."""
    cache_dtype = kv.setup_of(
        spec, tensor_parallel_size=1, cache_dtype=case["cache_dtype"], state_dtype="auto", draft_tokens=0, device="cuda", release="0.30"
    ).cache_dtype
    layout = KVCacheLayout.BLHNC if case.get("packed") else KVCacheLayout.LBHNC
    cache = plain(
        block_size=case["block_size"],
        cache_dtype=cache_dtype,
        mamba_cache_mode=case["state_mode"],
        mamba_block_size=case["block_size"] if case["state_mode"] == "align" else case["max_model_len"],
        mamba_page_size_padded=None,
        user_specified_mamba_block_size=False,
        skip_page_size_padded=None,
        kv_cache_dtype_skip_layers=[],
        num_gpu_blocks_override=None,
        prefix_cache_retention_interval=None,
        use_kda_recoverssm=False,
        get_resolved_kv_cache_layout=lambda: layout,
    )
    several = min(len(spec.mtp_layers), case["draft_tokens"]) > 1
    drafting = plain(num_speculative_tokens=case["draft_tokens"], use_multi_module_mtp=lambda: several, use_eagle_block_drop=lambda: False)
    drafting.use_eagle = lambda: False
    parallel = plain(decode_context_parallel_size=case["dcp"], pipeline_parallel_size=len(case["partition"]))
    return plain(
        cache_config=cache,
        model_config=plain(
            max_model_len=case["max_model_len"],
            original_max_model_len=case["max_model_len"],
            dtype=TORCH[spec.dtype],
            architecture="Test",
            use_mla=any(layer.attention.kind in ("mla", "sparse_mla") for layer in spec.layers),
        ),
        parallel_config=parallel,
        scheduler_config=plain(disable_hybrid_kv_cache_manager=False),
        attention_config=plain(hisparse_config=None),
        speculative_config=drafting if case["draft_tokens"] else None,
        num_speculative_tokens=case["draft_tokens"],
        max_in_flight_tokens=case["in_flight_tokens"],
    )


def state_of(attention, tp, drafts):
    """Shapes and dtype function of vLLM's own calculators."""
    a, shapes, dtypes = attention, MambaStateShapeCalculator, MambaStateDtypeCalculator
    if a.kind == "gdn":
        shape = shapes.gated_delta_net_state_shape(tp, a.state_key_heads, a.state_value_heads, a.state_key_dim, a.state_value_dim, a.conv_kernel, drafts)
        return shape, dtypes.gated_delta_net_state_dtype
    if a.kind == "kda":
        shape = shapes.kda_state_shape(tp, a.state_value_heads, a.state_value_dim, a.state_key_heads, a.state_key_dim, a.conv_kernel, drafts)
        return shape, dtypes.kda_state_dtype
    width = a.state_value_heads * a.state_value_dim
    shape = shapes.mamba2_state_shape(tp, width, a.state_groups, a.state_value_heads, a.state_value_dim, a.state_key_dim, a.conv_kernel, drafts)
    return shape, dtypes.mamba2_state_dtype


def mamba_spec(layer, spec, case, config, conv=False):
    drafts, model_dtype = case["draft_tokens"], TORCH[spec.dtype]
    if conv:
        c = layer.short_conv
        shapes = MambaStateShapeCalculator.short_conv_state_shape(1, c.channels, c.state_tokens + 1, drafts)
        dtypes = MambaStateDtypeCalculator.short_conv_state_dtype(model_dtype, "auto")
    else:
        shapes, dtype_of = state_of(layer.attention, case["tensor_parallel_size"], drafts)
        dtypes = dtype_of(model_dtype, "auto", spec.state_dtype)
    if config is None:
        return MambaSpec(shapes=tuple(shapes), dtypes=dtypes, block_size=-1)
    fake = plain(get_state_shape=lambda: shapes, get_state_dtype=lambda: dtypes, mamba_type="conv" if conv else layer.attention.kind)
    fake.is_kv_cache_tp_replicated = conv
    return MambaBase.get_kv_cache_spec(fake, config)


def align(spec, case, config, monkeypatch):
    """Run vLLM's own alignment of attention block and state page on the config."""
    states = [mamba_spec(layer, spec, case, None) for layer in spec.layers if layer.attention.kind in ("gdn", "kda", "mamba2")]
    states += [mamba_spec(layer, spec, case, None, conv=True) for layer in spec.layers if layer.short_conv]
    attention = next((layer.attention for layer in spec.layers if layer.attention.kind in ("full", "sliding", "mla", "sparse_gqa")), None)
    if not states or attention is None:
        return
    is_mla = attention.kind == "mla"
    config.model_config.get_num_kv_heads = lambda _: 1 if is_mla else max(1, attention.kv_heads // case["tensor_parallel_size"])
    config.model_config.get_head_size = lambda: 576 if is_mla else attention.head_dim
    fake_class = type("Model", (), {"get_mamba_specs_from_config": classmethod(lambda cls, _: states)})
    monkeypatch.setattr(ModelRegistry, "resolve_model_cls", lambda *a, **k: (fake_class, "Test"))
    if config.cache_config.cache_dtype == spec.dtype:
        config.cache_config.cache_dtype = "auto"
    Platform._align_hybrid_block_size(config, Backend)


def attention_specs(layer, spec, case, config, flipped):
    """Name endings and specs of an attention layer, made by vLLM's layer classes."""
    a, dtype = layer.attention, config.cache_config.cache_dtype
    torch_dtype = TORCH[spec.dtype if dtype == "auto" else dtype]
    owns = a.indexer is not None and (a.indexer.owns or flipped)
    if a.kind in ("mla", "sparse_mla"):
        fake = plain(head_size=a.kv_lora_rank + a.rope_head_dim, kv_cache_dtype=dtype if dtype in TORCH else "auto", sliding_window=None)
        fake.indexer, fake.non_causal_multi_token_decode = (object() if owns else None), False
        if fake.kv_cache_dtype in ("fp8_ds_mla", "nvfp4_ds_mla", "fp8", "float32", "bfloat16", "float16", "auto"):
            yield "attn", MLAAttention.get_kv_cache_spec(fake, config)
        if owns:
            width = a.indexer.head_dim + a.indexer.head_dim // 128 * 4
            yield "indexer", DeepseekV32IndexerCache.get_kv_cache_spec(plain(head_dim=width, dtype=torch.uint8, cache_config=config.cache_config), config)
        return
    heads = max(1, a.kv_heads // case["tensor_parallel_size"])
    fake = plain(attn_type=AttentionType.DECODER, kv_cache_dtype="auto", sliding_window=a.window, attn_backend=Backend, num_kv_heads=heads)
    fake.head_size, fake.head_size_v, fake.kv_cache_torch_dtype = a.head_dim, a.v_head_dim or a.head_dim, torch_dtype
    yield "attn", VllmAttention.get_kv_cache_spec(fake, config)
    if owns:
        ratio, block = a.indexer.compress_ratio, config.cache_config.block_size
        yield "key", MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=a.indexer.head_dim, dtype=torch.bfloat16, tokens_per_state=ratio)
        if ratio > 1:
            capacity = ratio * -(-(ratio + case["draft_tokens"]) // ratio)
            ring = dict(num_kv_heads=1, head_size=a.indexer.head_dim, head_size_v=0, dtype=torch.bfloat16)
            yield "ring", CircularBufferSpec(block_size=capacity, **ring)


def worker_specs(spec, case, config):
    """One dict of layer name to KVCacheSpec per stage, as the workers report them."""
    flips = kv.flipped_layers(spec, case["partition"]) if case["index_sharing"] == "flip" else [()] * len(case["partition"])
    workers, start = [], 0
    for stage, count in enumerate(case["partition"]):
        layers = list(spec.layers[start : start + count])
        if stage == len(case["partition"]) - 1 and case["draft_tokens"]:
            layers += spec.mtp_layers
        specs = {}
        for layer in layers:
            name = f"model.layers.{layer.index}"
            if layer.short_conv:
                specs[f"{name}.ple"] = mamba_spec(layer, spec, case, config, conv=True)
            if layer.attention.kind in ("gdn", "kda", "mamba2"):
                specs[f"{name}.mixer"] = mamba_spec(layer, spec, case, config)
            elif layer.attention.kind != "none" and not layer.attention.kv_shared:
                for ending, found in attention_specs(layer, spec, case, config, layer.index in flips[stage]):
                    specs[f"{name}.{ending}"] = found
        workers.append(specs)
        start += count
    return workers


def ask_vllm(spec, case, monkeypatch):
    """Blocks, logged tokens, concurrency, block size and groups that vLLM plans, or the exception it raises."""
    config = vllm_config(spec, case)
    align(spec, case, config, monkeypatch)
    workers = worker_specs(spec, case, config)
    configs = get_kv_cache_configs(config, workers, list(case["available"]))
    scheduler = generate_scheduler_kv_cache_config(configs)
    tokens, concurrency = get_kv_cache_capacity(config, scheduler)
    groups = [[sum(name in worker for name in group.layer_names) for worker in workers] for group in global_groups(config, workers)]
    return plain(blocks=scheduler.num_blocks, tokens=tokens, concurrency=concurrency, block=config.cache_config.block_size, groups=groups)


def global_groups(config, workers):
    return get_kv_cache_groups(config, {name: found for worker in workers for name, found in worker.items()})


def compare(spec, case, monkeypatch):
    """True where both planned, False where both refused."""
    try:
        theirs = ask_vllm(spec, case, monkeypatch)
    except (ValueError, AssertionError, NotImplementedError) as error:
        with pytest.raises(BadInput):
            ours = ask_fieldbook(spec, case)
            pytest.fail(f"vLLM refuses ({error}), fieldbook says {ours}")
        return False
    ours = ask_fieldbook(spec, case)
    assert (ours.block_size_tokens, ours.blocks) == (theirs.block, theirs.blocks)
    assert (ours.pool_tokens, ours.max_concurrency) == (theirs.tokens, theirs.concurrency)
    assert sorted(list(group.layers_per_stage) for group in ours.groups) == sorted(theirs.groups)
    return True


@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_are_counted_as_vllm_counts_them(family, monkeypatch):
    rng, planned = random.Random(f"kv {family}"), 0
    for _ in range(60):
        spec, case = random_case(rng, family)
        planned += compare(spec, case, monkeypatch)
    assert planned >= 20, "too few of the random layouts fit to prove anything"


@pytest.mark.parametrize(
    "spec, case",
    [
        (smollm2(), case_of([12, 18], [GIB, GIB], cache_dtype="float32", block_size=128)),
        (glm_5_3(), case_of([39, 39], [22 * GIB, 15 * GIB], cache_dtype="fp8", block_size=64, draft_tokens=3, tensor_parallel_size=4, index_sharing="flip")),
        (qwen3_5_27b(), case_of([64], [47 * GIB], tensor_parallel_size=2, draft_tokens=3, max_model_len=65536, state_mode="none")),
        (flash_next(), case_of([26, 22], [18 * GIB, 18 * GIB], draft_tokens=4, max_model_len=1 << 20, block_size=1616, packed=True)),
        (flash_next("bfloat16"), case_of([16, 16, 16], [20 * GIB] * 3, draft_tokens=3, max_model_len=200_000, packed=True)),
        (flash_next(indexed=False), case_of([24, 24], [20 * GIB] * 2, draft_tokens=2, max_model_len=200_000)),
    ],
    ids=["smollm2", "glm-5.3", "qwen3.5-27b", "flash-next-1616", "flash-next-pp3", "flash-next-no-index"],
)
def test_models_of_the_reports_are_counted_as_vllm_counts_them(spec, case, monkeypatch):
    assert compare(spec, case, monkeypatch)


def test_the_divisor_that_pads_least_is_vllms_own():
    rng = random.Random("divisor")
    for _ in range(300):
        values = [rng.randint(1, 60) for _ in range(rng.randint(1, 5))]
        bound = rng.randint(1, 70)
        assert kv.groups.approximate_gcd(values, bound) == kv_cache_utils._approximate_gcd(values, lower_bound=bound)


def test_in_flight_tokens_are_vllms_own():
    from vllm.config.vllm import VllmConfig

    for stages in (1, 2, 4):
        for asynchronous in (True, False):
            for v2 in (True, False):
                config = plain(
                    parallel_config=plain(pipeline_parallel_size=stages),
                    scheduler_config=plain(async_scheduling=asynchronous, max_num_batched_tokens=2048),
                    use_v2_model_runner=v2,
                )
                batches = VllmConfig.max_concurrent_batches
                config.max_concurrent_batches = getattr(batches, "func", None) or batches.fget
                config.max_concurrent_batches = config.max_concurrent_batches(config)
                theirs = VllmConfig.max_in_flight_tokens.fget(config)
                assert kv.in_flight_tokens(2048, stages, async_scheduling=asynchronous, v2_runner=v2) == theirs


def planned_elsewhere(spec, case, monkeypatch):
    """(layers that a worker is given tensors for and does not have, blocks) of every worker."""
    config = vllm_config(spec, case)
    align(spec, case, config, monkeypatch)
    workers = worker_specs(spec, case, config)
    configs = kv_cache_utils.get_kv_cache_configs(config, workers, list(case["available"]))
    return [
        (sorted({name for tensor in found.kv_cache_tensors for name in tensor.layers} - set(own)), found.num_blocks)
        for own, found in zip(workers, configs, strict=True)
    ]


def test_the_ghost_patch_plans_no_tensors_of_layers_that_are_elsewhere(monkeypatch):
    """Two stages of Flash-Next: only the first has the n-gram layer's convolution, and stock plans its tensor on the second as well."""
    path = "v1/core/kv_cache_utils.py"
    tree = patches.vllm_tree()
    one = next(one for one in patches.CATALOGUE["kv-ghost"].sites if one.file == path)
    module = site.parse(store.original(tree, path, store.load(tree)))
    spec, case = flash_next(), case_of([24, 24], [2 * GIB] * 2, packed=True)

    def run(code):
        function = site.function_of(code, one.symbol)
        exec(compile(code.code_for_node(function), path, "exec"), kv_cache_utils.__dict__)
        return planned_elsewhere(spec, case, monkeypatch)

    kept = kv_cache_utils.get_kv_cache_config_from_groups
    try:
        stock, mended = run(module), run(site.edited(one, module))
    finally:
        kv_cache_utils.get_kv_cache_config_from_groups = kept
    assert stock[0][0] == [] and stock[1][0] == ["model.layers.1.ple"]
    assert [ghosts for ghosts, _ in mended] == [[], []]
    # Nothing else changes: the same blocks on both.
    assert [blocks for _, blocks in mended] == [blocks for _, blocks in stock]
