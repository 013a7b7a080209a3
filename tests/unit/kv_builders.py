"""Small models, built by hand, for the tests of KV accounting: one function per family, layer counts and head sizes as their configs have them."""

from fieldbook import kv
from fieldbook.spec import Attention, Indexer, Layer, Mlp, ModelSpec, Quantization, ShortConv

GIB = 2**30
FAMILIES = ["full", "sliding", "mla", "dsa", "hybrid", "hybrid-mla", "packed"]
MOE = Mlp("moe", experts=8, experts_per_token=2, expert_intermediate_size=512)


def model(layers, mtp=(), *, name="model", dtype="bfloat16", state_dtype="auto", kv_cache_scheme=None):
    """A ModelSpec of these attentions, in order. An attention, or a pair of attention and ShortConv, for each layer."""

    def layer(index, part):
        attention, conv = part if isinstance(part, tuple) else (part, None)
        return Layer(index, attention, MOE, short_conv=conv)

    quantization = Quantization("modelopt", 4, "float", "group", kv_cache_scheme=kv_cache_scheme) if kv_cache_scheme else None
    main = tuple(layer(i, part) for i, part in enumerate(layers))
    drafts = tuple(layer(len(main) + i, part) for i, part in enumerate(mtp))
    return ModelSpec(name, "Test", "test", 1024, 32000, False, 1 << 20, dtype, main, drafts, quantization, state_dtype)


def gqa(heads=32, kv_heads=8, head_dim=128, **more):
    return Attention("full", heads=heads, kv_heads=kv_heads, head_dim=head_dim, **more)


def sliding(window, heads=32, kv_heads=8, head_dim=128, **more):
    return Attention("sliding", heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window, **more)


def mla(**more):
    return Attention("mla", heads=64, kv_lora_rank=512, rope_head_dim=64, nope_head_dim=128, v_head_dim=128, **more)


def dsa(owns=True):
    return Attention("sparse_mla", heads=64, kv_lora_rank=512, rope_head_dim=64, nope_head_dim=192, v_head_dim=256, indexer=Indexer(32, 128, 2048, owns))


def qsa(owns=True, compress_ratio=4, head_dim=128):
    indexer = Indexer(8, head_dim, 2048, owns, compress_ratio=compress_ratio)
    return Attention("sparse_gqa", heads=24, kv_heads=2, head_dim=256, indexer=indexer)


def gdn(value_heads=48, key_heads=16, key_dim=128, value_dim=128, kernel=4):
    return Attention("gdn", state_key_heads=key_heads, state_value_heads=value_heads, state_key_dim=key_dim, state_value_dim=value_dim, conv_kernel=kernel)


def kda(heads=32, dim=128, kernel=4):
    return Attention("kda", state_key_heads=heads, state_value_heads=heads, state_key_dim=dim, state_value_dim=dim, conv_kernel=kernel)


def mamba2(heads=128, head_dim=64, state=128, groups=8, kernel=4):
    return Attention("mamba2", state_value_heads=heads, state_value_dim=head_dim, state_key_dim=state, state_groups=groups, conv_kernel=kernel)


def smollm2():
    """SmolLM2-135M: 30 layers, 3 KV heads of 64."""
    return model([gqa(9, 3, 64)] * 30, name="smollm2")


def glm_5_3():
    """GLM-5.2 and 5.3: 78 layers; 0, 1, 2, 6, 10, ..., 74 compute their own indices, and so does the MTP layer."""
    return model([dsa(owns=max(i - 3 + 1, 0) % 4 == 0) for i in range(78)], [dsa()], name="glm-5.3")


def glm_5_1():
    """GLM-5.1: every layer computes its own indices."""
    return model([dsa()] * 78, [dsa()], name="glm-5.1")


def kimi_k2():
    """Kimi-K2: 61 layers of dense MLA."""
    return model([mla()] * 61, name="kimi-k2")


def qwen3_5_27b():
    """Qwen3.5-27B and its successors: 64 layers, every fourth with attention, one MTP layer; the config declares a float32 state."""
    attention = gqa(24, 4, 256)
    return model([attention if i % 4 == 3 else gdn() for i in range(64)], [attention], name="qwen3.5-27b", state_dtype="float32")


def flash_next(state_dtype="float32", indexed=True):
    """Qwen3.8-Flash-Next: 48 layers, every fourth with sparse attention; n-gram embedding with a short convolution on layer 1 (hidden 2560, hc_count 4)."""
    attention = qsa() if indexed else gqa(24, 2, 256)
    layers = [attention if i % 4 == 3 else gdn() for i in range(48)]
    layers[1] = (layers[1], ShortConv(channels=4 * 2560, state_tokens=3 * 3))
    return model(layers, [attention], name="flash-next", state_dtype=state_dtype)


def ask_fieldbook(spec, case):
    return kv.pool(
        spec,
        case["partition"],
        case["available"],
        max_model_len=case["max_model_len"],
        tensor_parallel_size=case["tensor_parallel_size"],
        cache_dtype=case["cache_dtype"],
        block_size=case["block_size"],
        draft_tokens=case["draft_tokens"],
        index_sharing=case["index_sharing"],
        dcp=case["dcp"],
        state_mode=case["state_mode"],
        in_flight_tokens=case["in_flight_tokens"],
    )


def case_of(partition, available, **more):
    base = dict(partition=partition, available=available, tensor_parallel_size=1, cache_dtype="auto", block_size=16, max_model_len=8192, draft_tokens=0)
    return base | dict(index_sharing="stock", dcp=1, state_mode="align", in_flight_tokens=None) | more


def split(rng, layers, stages):
    cuts = sorted(rng.sample(range(1, layers), stages - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]


def random_layers(rng, family):
    """Attentions of a random model of a family, and those of its draft layers."""
    n = rng.randint(4, 40)
    kv_heads, head_dim = rng.choice([1, 2, 4, 8]), rng.choice([64, 128, 256])
    full = gqa(32, kv_heads, head_dim, v_head_dim=rng.choice([0, 0, 64]))
    if family == "full":
        wide = gqa(32, kv_heads, head_dim * 2)
        return [rng.choice([full, wide]) if rng.random() < 0.3 else full for _ in range(n)], [full]
    if family == "sliding":
        local = sliding(rng.choice([128, 512, 1024]), 32, rng.choice([kv_heads, 8]), rng.choice([64, 128, 256]))
        other = sliding(4096, 32, local.kv_heads, local.head_dim)
        every = rng.randint(2, 6)
        layers = [full if i % every == every - 1 else (other if rng.random() < 0.05 else local) for i in range(n)]
        return (layers if rng.random() < 0.9 else [local] * n), [rng.choice([full, local])] * rng.choice([1, 2])
    if family == "mla":
        return [mla()] * n, [mla()]
    if family == "dsa":
        freq = rng.choice([1, 2, 4])
        return [dsa(owns=max(i - 2, 0) % freq == 0) for i in range(n)], [dsa()]
    if family == "hybrid-mla":
        state = kda(rng.choice([8, 16, 32]))
        return [mla() if i % 4 == 3 else state for i in range(n)], [mla()]
    state = rng.choice([gdn(rng.choice([16, 32, 48])), mamba2(rng.choice([64, 128]), groups=rng.choice([1, 2, 8]))])
    full = gqa(32, rng.choice([1, 2, 4]), rng.choice([128, 256])) if family == "hybrid" else qsa(head_dim=rng.choice([64, 128]))
    every = rng.choice([2, 3, 4, 8])
    layers = [full if i % every == every - 1 or rng.random() < 0.05 else state for i in range(n)]
    if rng.random() < 0.5 and layers[0] is not full:
        layers[0] = (layers[0], ShortConv(rng.choice([2048, 10240]), 9))
    return layers, [full]


def random_case(rng, family):
    layers, drafts = random_layers(rng, family)
    dtype = rng.choice(["bfloat16", "bfloat16", "float32"]) if family in ("full", "sliding", "mla") else "bfloat16"
    spec = model(layers, drafts, dtype=dtype, state_dtype=rng.choice(["auto", "float32", "bfloat16"]))
    stages = rng.randint(1, min(4, len(layers)))
    tp = rng.choice([1, 2, 4, 8])
    max_model_len = rng.choice([1000, 8192, 65536, 262144, rng.randint(100, 500_000)])
    dtypes = {"dsa": ["auto", "fp8", "fp8_ds_mla", "nvfp4_ds_mla"], "mla": ["auto", "fp8"], "full": ["auto", "fp8", "float32"]}
    can_split_tokens = family in ("mla", "dsa") and tp > 1
    case = case_of(
        split(rng, len(layers), stages),
        [int(GIB * rng.uniform(0.05, 60)) for _ in range(stages)],
        tensor_parallel_size=tp,
        cache_dtype=rng.choice(dtypes.get(family, ["auto"])),
        block_size=64 if family in ("dsa", "mla") else rng.choice([16, 16, 32, 128]),
        max_model_len=max_model_len,
        draft_tokens=rng.choice([0, 1, 3]),
        index_sharing=rng.choice(["stock", "flip", "relay"]),
        dcp=rng.choice([1, tp]) if can_split_tokens else 1,
        state_mode=rng.choice(["align", "none"]),
        in_flight_tokens=kv.in_flight_tokens(rng.choice([2048, 8192]), stages),
        packed=family == "packed",
    )
    return spec, case
