"""KV cache and recurrent state: pages of a layer, block sizes, groups, and the pool that a layout leaves, as vLLM 0.29 to 0.33 count them.

Bytes and tokens throughout; needs neither torch nor vLLM. `costs` has the same for a search over all splits, and needs numpy.
"""

from .blocks import default_block_size_tokens, hybrid_block_size_tokens, hybrid_page
from .groups import Group, Request, blocks_per_request, form_groups
from .pages import STATE_KINDS, Cache, Page, Setup, indexer_bytes_per_token, kv_bytes_per_token, setup_of, state_bytes
from .pool import GroupLedger, Pool, RankLedger, fits, pool, pool_tokens
from .releases import RELEASES, in_flight_tokens, rules
from .stages import flipped_layers, model_caches, stage_bounds, stage_flips

__all__ = [
    "RELEASES",
    "STATE_KINDS",
    "Cache",
    "Group",
    "GroupLedger",
    "Page",
    "Pool",
    "RankLedger",
    "Request",
    "Setup",
    "blocks_per_request",
    "default_block_size_tokens",
    "fits",
    "flipped_layers",
    "form_groups",
    "hybrid_block_size_tokens",
    "hybrid_page",
    "in_flight_tokens",
    "indexer_bytes_per_token",
    "kv_bytes_per_token",
    "model_caches",
    "pool",
    "pool_tokens",
    "rules",
    "setup_of",
    "stage_bounds",
    "stage_flips",
    "state_bytes",
]
