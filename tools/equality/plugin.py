"""A vLLM general plugin for comparing layouts token for token; `prove.py` plants it beside the servers that it compares, never beside a user's.

What two layouts compute is equal only if they start from the same numbers and add them up in the same order. EQUALITY in the environment names, with commas
between, what is wanted of it:

    weights     made-up weights from a seed per parameter name, so the same under every split; what tensor parallelism cuts differs from shard to shard
    sorted      the top-k indices of sparse latent attention in one order: without it a run does not even repeat itself beyond index_topk
    sorted-blocks    the same for the blocks that a Qwen4Exp's sparse attention picks, beyond its indexer_budget
    one-card    all ranks on the first visible GPU
    space       the KV space of each rank is printed in bytes; vLLM's log has two decimals of a GiB
    sockets     CPU ranks talk through sockets (gloo), as those of two machines do, and not through shared memory
    state=D     the last pipeline rank keeps recurrent state in the dtype D, whatever the others do: the mismatch that a draft model's hook once made
"""

import os
import zlib

# Parameters that tensor parallelism cuts; all others are the same on every rank of a group.
CUT = ("experts", "gate_up_proj", "down_proj", "q_b_proj", "kv_b_proj", "o_proj", "qkv_proj", "in_proj", "out_proj", "embed_tokens", "lm_head")


def register() -> None:
    """The entry point: loaded once in each process."""
    wanted = [word for word in os.environ.get("EQUALITY", "").split(",") if word]
    if not wanted or getattr(register, "done", False):
        return
    register.done = True
    for word in wanted:
        name, _, value = word.partition("=")
        known = {
            "weights": weights, "sorted": sorted_indices, "sorted-blocks": sorted_blocks, "one-card": one_card, "space": space, "sockets": sockets,
            "state": other_state,
        }  # fmt: skip
        known[name](*filter(None, [value]))


def weights() -> None:
    """Matrices from a normal distribution that keeps activations near one; vectors one, biases zero."""
    import torch
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    def seed_of(name: str) -> int:
        shard = get_tensor_model_parallel_rank() if any(part in name for part in CUT) else 0
        return zlib.crc32(f"{name}/{shard}".encode())

    def fill(name: str, data: torch.Tensor) -> None:
        if data.dim() < 2:
            data.fill_(0.0 if "bias" in name else 1.0)
            return
        generator = torch.Generator(device=data.device).manual_seed(seed_of(name))
        scale = 1.0 if "embed_tokens" in name else data.shape[-1] ** -0.5
        # Expert by expert: a float32 copy of all of them at once is larger than the model.
        for part in data if data.dim() > 2 else [data]:
            part.copy_(torch.randn(part.shape, generator=generator, device=data.device) * scale)

    def load_weights(self, model, model_config) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if torch.is_floating_point(parameter):
                    fill(name, parameter.data)

    DummyModelLoader.load_weights = load_weights


def sorted_indices() -> None:
    """Each row of picked indices in descending order, the padding (-1) last."""
    import torch
    from vllm.models.deepseek_v32 import attention

    pick = attention.sparse_attn_indexer

    def picked(hidden_states, *arguments, **named):
        result = pick(hidden_states, *arguments, **named)
        rows = next(one for one in arguments if isinstance(one, torch.Tensor) and one.dtype == torch.int32 and one.dim() == 2)
        used = rows[: hidden_states.shape[0]]
        used.copy_(used.sort(dim=-1, descending=True).values)
        return result

    attention.sparse_attn_indexer = picked


def sorted_blocks() -> None:
    """Each row of picked blocks in descending order; what a row has no use for (it sees fewer blocks than it may pick) is -1 and comes last."""
    import torch
    from vllm.models.qwen4_exp.nvidia.ops import qsa_indexer

    expand = qsa_indexer.expand_qsa_block_indices

    def expanded(block_indices, query_positions, visible_blocks, *arguments):
        unused = torch.arange(block_indices.shape[1], device=block_indices.device) >= visible_blocks.unsqueeze(1)
        block_indices.copy_(block_indices.masked_fill(unused, -1).sort(dim=-1, descending=True).values)
        expand(block_indices, query_positions, visible_blocks, *arguments)

    # Looked up anew at each call, in QSAIndexer.forward.
    qsa_indexer.expand_qsa_block_indices = expanded


def one_card() -> None:
    """NCCL has to allow it as well: NCCL_MULTI_RANK_GPU_ENABLE=1, which 2.32.3 knows and 2.29.7 does not."""
    import torch
    from vllm.platforms import current_platform

    seen = torch.accelerator.device_count
    torch.accelerator.device_count = lambda: max(8, seen())
    type(current_platform).logical_device_id_to_visible_device_id = classmethod(lambda cls, number: 0)


def space() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    ask = Worker.determine_available_memory

    def told(self):
        found = ask(self)
        print(f"equality: rank {self.rank} has {int(found)} bytes for the KV cache", flush=True)
        return found

    Worker.determine_available_memory = told


def sockets() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def other_state(dtype: str) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    load = Worker.load_model

    def loaded(self, *arguments, **named):
        if self.rank == self.parallel_config.world_size - 1:
            self.vllm_config.cache_config.mamba_ssm_cache_dtype = dtype
        return load(self, *arguments, **named)

    Worker.load_model = loaded
