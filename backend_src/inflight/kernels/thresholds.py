"""The smallest of the values that are kept, found without sorting: for kernels over one row.

A value's key is an int32 that ranks as the value does. The key is found digit by digit, from the
highest on (radix selection): a pass over the row adds up what comes to each digit among the values
that agree in all digits before it. A value that is alone with its digits ends the search. Digits
have two bits: larger ones would need fewer passes, and so many registers that too few logits were
under way. Nothing is added up in an order that could change between two runs.

The ``rules`` of a row are five numbers that go together from function to function: its largest
logit, its temperature, the smallest logit that min_p leaves, and key and id of the last one that
top_k leaves.
"""

from __future__ import annotations

from inflight.kernels.language import jit, tl

_SIGN: tl.constexpr = tl.constexpr(-(2**31))
_DIGIT_BITS: tl.constexpr = tl.constexpr(2)
_NUM_DIGITS: tl.constexpr = tl.constexpr(4)
_HIGHEST_SHIFT: tl.constexpr = tl.constexpr(30)
_HIGHEST_DIGIT: tl.constexpr = tl.constexpr(-(2**30))


@jit()
def load_logits(
    row_ptr: tl.tensor, first: tl.tensor, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Ids from ``first`` on, whether there are such, and their logits; 0 stands for -0 too."""
    ids = first + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + ids, mask=ids < VOCAB_SIZE, other=float("-inf"))
    return ids, ids < VOCAB_SIZE, tl.where(x == 0.0, 0.0, x)


@jit()
def key_of(x: tl.tensor) -> tl.tensor:
    """Of float32 without NaN and -0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit()
def weight_of(x: tl.tensor, peak: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """exp((x - peak) / temperature), float32. Below exp(-150) it is 0 in any case."""
    return tl.exp(tl.div_rn(tl.maximum(x - peak, -150.0 * temperature), temperature))


@jit()
def is_kept(key: tl.tensor, ids: tl.tensor, last_key: tl.tensor, last_id: tl.tensor) -> tl.tensor:
    """Above the last one that is kept, or its equal with no higher id."""
    return (key > last_key) | ((key == last_key) & (ids <= last_id))


@jit()
def _values(
    row_ptr: tl.tensor,
    first: tl.tensor,
    rules: tl.tuple,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
) -> tl.tensor:
    """Ids, which of them take part, their keys and weights; without BY_WEIGHT all take part, the
    keys are those of the logits, and a weight means nothing."""
    ids, is_in, x = load_logits(row_ptr, first, VOCAB_SIZE, BLOCK)
    key, weight = key_of(x), x
    if BY_WEIGHT:
        peak, temperature, least, last_key, last_id = rules
        is_in = is_in & (x >= least) & is_kept(key, ids, last_key, last_id)
        weight = weight_of(x, peak, temperature)
        key = weight.to(tl.int32, bitcast=True)
    return ids, is_in, key, weight


@jit()
def find_last(
    row_ptr: tl.tensor,
    wanted: tl.tensor,
    rules: tl.tuple,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
) -> tl.tensor:
    """Key and id of the last value that is kept, by rank, where the fewest are kept that come to
    ``wanted`` (float64): in number, or BY_WEIGHT in the sum of their weights. Equal values rank by
    id, the lower one first. Where rounding leaves all of them below ``wanted``, all are kept.

    BY_WEIGHT the values are the weights of the logits that ``rules`` leave; without it they are all
    logits, and the rules are not read.
    """
    digits = tl.arange(0, _NUM_DIGITS)
    prefix = 0
    known = 0
    shift = 0 + _HIGHEST_SHIFT
    num_left = VOCAB_SIZE
    above = tl.full([], 0.0, tl.float64)
    while (shift >= 0) & (num_left > 1):
        number, amount = _of_digits(
            row_ptr, prefix, known, shift, rules, VOCAB_SIZE, BLOCK, BY_WEIGHT
        )
        is_higher = digits[:, None] >= digits[None, :]
        reached = above + tl.sum(tl.where(is_higher, amount[:, None], 0.0), axis=0)
        digit = tl.max(tl.where((number > 0) & (reached >= wanted), digits, -1), axis=0)
        lowest = tl.min(tl.where(number > 0, digits, _NUM_DIGITS), axis=0)
        digit = tl.where(digit < 0, lowest, digit)
        above += tl.sum(tl.where(digits > digit, amount, 0.0), axis=0)
        num_left = tl.sum(tl.where(digits == digit, number, 0), axis=0)
        prefix = prefix | (digit << shift)
        known = (known >> _DIGIT_BITS) | _HIGHEST_DIGIT
        shift -= _DIGIT_BITS
    key = prefix ^ _SIGN
    if shift >= 0:
        key = _only_key(row_ptr, prefix, known, rules, VOCAB_SIZE, BLOCK, BY_WEIGHT)
    # All that are left are equals now.
    each = tl.full([], 1.0, tl.float64)
    if BY_WEIGHT:
        each = key.to(tl.float32, bitcast=True).to(tl.float64)
    is_something = each > 0
    needed = tl.ceil((wanted - above) / tl.where(is_something, each, 1.0))
    needed = tl.where(is_something, tl.maximum(needed, 1.0), num_left.to(tl.float64))
    last = VOCAB_SIZE
    if needed < num_left:
        nth = needed.to(tl.int32)
        last = _nth_equal(row_ptr, key, nth, rules, VOCAB_SIZE, BLOCK, BY_WEIGHT)
    return key, last


@jit()
def _of_digits(
    row_ptr: tl.tensor,
    prefix: tl.tensor,
    known: tl.tensor,
    shift: tl.tensor,
    rules: tl.tuple,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
) -> tl.tensor:
    """How many values have each digit at ``shift``, of those whose bits in ``known`` are those of
    ``prefix``; and in float64 what counts of them: their number, or the sum of their weights."""
    digits = tl.arange(0, _NUM_DIGITS)
    numbers = tl.zeros([BLOCK, _NUM_DIGITS], tl.int32)
    sums = tl.zeros([BLOCK, _NUM_DIGITS], tl.float32)
    for first in range(0, VOCAB_SIZE, BLOCK):
        ids, is_in, key, weight = _values(row_ptr, first, rules, VOCAB_SIZE, BLOCK, BY_WEIGHT)
        bits = key ^ _SIGN
        is_in = is_in & ((bits & known) == prefix)
        digit = tl.where(is_in, (bits >> shift) & (_NUM_DIGITS - 1), _NUM_DIGITS)
        is_here = digit[:, None] == digits[None, :]
        numbers += is_here.to(tl.int32)
        if BY_WEIGHT:
            sums += tl.where(is_here, weight[:, None], 0.0)
    number = tl.sum(numbers, axis=0)
    amount = number.to(tl.float64)
    if BY_WEIGHT:
        amount = tl.sum(sums.to(tl.float64), axis=0)
    return number, amount


@jit()
def _only_key(
    row_ptr: tl.tensor,
    prefix: tl.tensor,
    known: tl.tensor,
    rules: tl.tuple,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
) -> tl.tensor:
    """The key of the one value whose bits in ``known`` are those of ``prefix``."""
    largest = tl.full([BLOCK], _SIGN, tl.int32)
    for first in range(0, VOCAB_SIZE, BLOCK):
        ids, is_in, key, weight = _values(row_ptr, first, rules, VOCAB_SIZE, BLOCK, BY_WEIGHT)
        is_in = is_in & (((key ^ _SIGN) & known) == prefix)
        largest = tl.maximum(largest, tl.where(is_in, key, _SIGN))
    return tl.max(largest, axis=0)


@jit()
def _nth_equal(
    row_ptr: tl.tensor,
    wanted_key: tl.tensor,
    n: tl.tensor,
    rules: tl.tuple,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
) -> tl.tensor:
    """The id of the n-th value with this key, counted from 1 by id; there are as many."""
    num_before = 0
    nth = VOCAB_SIZE
    for first in range(0, VOCAB_SIZE, BLOCK):
        ids, is_in, key, weight = _values(row_ptr, first, rules, VOCAB_SIZE, BLOCK, BY_WEIGHT)
        is_equal = (is_in & (key == wanted_key)).to(tl.int32)
        place = num_before + tl.cumsum(is_equal, axis=0)
        nth = tl.minimum(nth, tl.min(tl.where(place >= n, ids, VOCAB_SIZE), axis=0))
        num_before += tl.sum(is_equal, axis=0)
    return nth
