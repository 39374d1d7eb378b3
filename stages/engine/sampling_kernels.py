"""Compiled loops of the sampler: weights element by element, sums in order of token id in double precision.

Shapes: every array is [vocab].
"""

import math

import numpy as np

from stages.engine.arithmetic import compiled, exp_in_place

_ZERO = np.float32(0)


@compiled
def first_largest(logits):
    """Index of the largest value; the lowest index among equals."""
    best = 0
    for i in range(1, len(logits)):
        if logits[i] > logits[best]:
            best = i
    return best


@compiled
def softmax_weights(logits, inverse_temperature, weights, bits):
    """weights = e^((logits - max) / temperature); the largest is 1."""
    largest = logits[0]
    for i in range(len(logits)):
        largest = max(largest, logits[i])
    for i in range(len(logits)):
        weights[i] = (logits[i] - largest) * inverse_temperature
    exp_in_place(weights, len(logits), bits)
    # exp_in_place stops at e^-87; what is further below cannot be drawn.
    for i in range(len(logits)):
        if (logits[i] - largest) * inverse_temperature < np.float32(-87):
            weights[i] = _ZERO


@compiled
def keep_top_k(logits, weights, threshold, k):
    """Zero all weights but those of the k largest logits; `threshold` is the k-th largest, ties go to lower ids."""
    above = 0
    for i in range(len(logits)):
        if logits[i] > threshold:
            above += 1
    ties_left = k - above
    for i in range(len(logits)):
        if logits[i] > threshold:
            continue
        if logits[i] == threshold and ties_left > 0:
            ties_left -= 1
        else:
            weights[i] = _ZERO


@compiled
def sequential_sum(weights):
    """Sum in order of index, in double precision."""
    total = 0.0
    for i in range(len(weights)):
        total += weights[i]
    return total


@compiled
def length_to_reach(weights, target):
    """How many of the leading weights it takes to reach target; 0 if all of them do not."""
    total = 0.0
    for i in range(len(weights)):
        total += weights[i]
        if total >= target:
            return i + 1
    return 0


@compiled
def invert_cumulative(weights, u):
    """First index whose cumulative weight exceeds u times the total."""
    target = u * sequential_sum(weights)
    total = 0.0
    last = 0
    for i in range(len(weights)):
        if weights[i] > _ZERO:
            total += weights[i]
            last = i
            if total > target:
                return i
    return last


@compiled
def log_normaliser(logits, scratch, bits):
    """log of the sum of e^logits."""
    largest = logits[0]
    for i in range(len(logits)):
        largest = max(largest, logits[i])
    for i in range(len(logits)):
        scratch[i] = logits[i] - largest
    exp_in_place(scratch, len(logits), bits)
    return float(largest) + math.log(sequential_sum(scratch))
