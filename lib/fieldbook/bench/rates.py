"""Rates and latencies out of a client's raw times. All times in seconds, one entry per stream."""

import itertools


def decode_tok_s(start_s: list[float], ttft_s: list[float], itl_s: list[list[float]], output_tokens: list[int]) -> float:
    """Tokens per second of all streams together while every stream is decoding.

    The window opens when the last stream has its first token and closes when the first stream has its last one. Events are weighted so that
    each stream's sum is the server's token count, because one event may carry several tokens. 0.0 when the streams never overlapped.
    """
    times = [list(itertools.accumulate(gaps, initial=start + ttft)) for start, ttft, gaps in zip(start_s, ttft_s, itl_s, strict=True)]
    if any(len(stream) < 2 for stream in times):
        return 0.0
    opens, closes = max(stream[0] for stream in times), min(stream[-1] for stream in times)
    if closes <= opens:
        return 0.0
    tokens = 0.0
    for stream, count in zip(times, output_tokens, strict=True):
        tokens_per_event = (count - 1) / (len(stream) - 1)
        tokens += tokens_per_event * sum(opens < moment <= closes for moment in stream)
    # A stream whose events lie before the window's edge has the rest of an interval inside it: on average that evens out over streams.
    return tokens / (closes - opens)


def in_microseconds(start_s: list[float], ttft_s: list[float], itl_s: list[list[float]]) -> tuple[list[float], list[float], list[list[float]]]:
    """The same times from the first start on, in whole microseconds: no clock of a client is finer, and what is kept is what a rate is worked out from."""
    begin = min(start_s, default=0.0)
    return [round(s - begin, 6) for s in start_s], [round(s, 6) for s in ttft_s], [[round(gap, 6) for gap in gaps] for gaps in itl_s]


def stream_tok_s(itl_s: list[list[float]], output_tokens: list[int]) -> list[float]:
    """Decode rate of each stream alone, first token to last; streams of one token have none."""
    return [(count - 1) / sum(gaps) for gaps, count in zip(itl_s, output_tokens, strict=True) if count > 1 and sum(gaps) > 0]


def latency_s(ttft_s: list[float], itl_s: list[list[float]]) -> list[float]:
    """Request to last token, for each stream."""
    return [first + sum(gaps) for first, gaps in zip(ttft_s, itl_s, strict=True)]


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of them do not exceed, between two of them linearly. Raises ValueError for none."""
    if not values:
        raise ValueError("a percentile of no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
