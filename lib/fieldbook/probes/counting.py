"""k of N: bounds, comparison of two counts, and how many trials a question needs. Exact, by the binomial and hypergeometric distributions."""

import math


def bounds(k: int, n: int, sure: float = 0.95) -> tuple[float, float]:
    """Clopper-Pearson bounds of a rate, each `sure` by itself: the rate is below the upper one in 95 of 100 such experiments, and above the lower one.

    0 of 20 gives (0, 0.139): nothing seen only bounds the rate below 14%. Both together hold at 2 x sure - 1. Raises ValueError for n < 1 or k outside.
    """
    from scipy.stats import beta

    if n < 1 or not 0 <= k <= n:
        raise ValueError(f"{k} of {n} is no count")
    low = 0.0 if k == 0 else float(beta.ppf(1 - sure, k, n - k + 1))
    high = 1.0 if k == n else float(beta.ppf(sure, k + 1, n - k))
    return low, high


def more_p(k: int, n: int, base_k: int, base_n: int) -> float:
    """Fisher's exact test, one-sided: how likely so many or more of k of n would be, were both rates the same."""
    from scipy.stats import hypergeom

    return float(hypergeom.sf(k - 1, n + base_n, k + base_k, n))


def trials_to_see(rate: float, sure: float = 0.95) -> int:
    """Trials after which a fault of this rate has shown itself at least once, with this probability. Raises ValueError for a rate outside (0, 1)."""
    if not 0 < rate < 1 or not 0 < sure < 1:
        raise ValueError("rate and sure lie between 0 and 1")
    return math.ceil(math.log(1 - sure) / math.log(1 - rate))


def trials_to_tell(rate: float, base_k: int, base_n: int, max_p: float = 0.05, power: float = 0.8, most: int = 100_000) -> int | None:
    """Trials after which Fisher's test tells a rate from a baseline's count with this probability; None where `most` do not do.

    The baseline is what it is: more trials of the candidate alone cannot make up for one of five.
    """
    from scipy.stats import binom

    def tells(n: int) -> bool:
        # The smallest count that the test calls more, and how likely it, or more, is.
        low, high = 0, n + 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if middle <= n and more_p(middle, n, base_k, base_n) < max_p else (middle + 1, high)
        return low <= n and float(binom.sf(low - 1, n, rate)) >= power

    n = 4
    while not tells(n):
        n *= 2
        if n > most:
            return None
    low, high = n // 2, n
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if tells(middle) else (middle + 1, high)
    return low


def share_text(k: int, n: int) -> str:
    """'21 of 100: 21% (14.6% to 28.9%)'; '0 of 20: below 13.9%'; '20 of 20: above 86.1%'."""
    if n < 1:
        return "none asked"
    low, high = bounds(k, n)
    if k == 0:
        return f"0 of {n}: below {high:.1%}"
    if k == n:
        return f"{n} of {n}: above {low:.1%}"
    return f"{k} of {n}: {k / n:.0%} ({low:.1%} to {high:.1%})"
