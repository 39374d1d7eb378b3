"""The sampler: keyed, ordered, and never dependent on anything but its arguments."""

import numpy as np
import pytest

from stages.engine.sampling import SamplingSpec, TokenHistory, sample, uniform

VOCAB = 1000


def logits(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32)


def probabilities(values: np.ndarray, temperature: float) -> np.ndarray:
    scaled = values.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def draws(values: np.ndarray, spec: SamplingSpec, count: int) -> np.ndarray:
    history = TokenHistory.of(())
    return np.array([sample(values, spec, n, history).token_id for n in range(count)])


def test_greedy_takes_the_largest_and_the_lower_id_on_a_tie() -> None:
    values = logits()
    values[[100, 700]] = 50.0
    assert sample(values, SamplingSpec(seed=1, temperature=0.0), 0, TokenHistory.of(())).token_id == 100


def test_a_token_is_a_function_of_seed_and_position() -> None:
    values, spec = logits(), SamplingSpec(seed=42, temperature=0.8)
    assert draws(values, spec, 50).tolist() == draws(values, spec, 50).tolist()
    assert draws(values, spec, 50).tolist() != draws(values, SamplingSpec(seed=43, temperature=0.8), 50).tolist()


def test_uniform_numbers_are_those_of_philox() -> None:
    """Pinned: another generator, or another use of it, would silently change every sampled text."""
    assert uniform(0, 0) == np.random.Philox(key=0, counter=0).random_raw() // 2048 / 2**53
    assert [round(uniform(7, n), 12) for n in range(3)] == PINNED_UNIFORMS
    assert all(0 <= uniform(2**63 - 1, n) < 1 for n in range(100))


PINNED_UNIFORMS = [0.87207345482, 0.082842687027, 0.014107696329]


def test_frequencies_follow_the_distribution() -> None:
    """20,000 draws: the chance that a right sampler fails this bound is below 1e-6."""
    values, count = logits(5)[:20], 20_000
    expected = probabilities(values, 0.8) * count
    observed = np.bincount(draws(values, SamplingSpec(seed=3, temperature=0.8), count), minlength=20)
    kept = expected > 5
    chi_square = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_square < kept.sum() + 7 * np.sqrt(2 * kept.sum())


def test_top_k_keeps_exactly_k_with_ties_to_lower_ids() -> None:
    values = np.zeros(VOCAB, np.float32)
    seen = set(draws(values, SamplingSpec(seed=1, temperature=1.0, top_k=5), 400).tolist())
    assert seen == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    values = np.log(np.array([0.05, 0.5, 0.15, 0.3], np.float32))
    seen = set(draws(values, SamplingSpec(seed=1, temperature=1.0, top_p=0.7), 400).tolist())
    assert seen == {1, 3}


def test_top_p_over_a_flat_distribution_needs_more_than_the_first_candidates() -> None:
    values = np.zeros(VOCAB, np.float32)
    seen = draws(values, SamplingSpec(seed=1, temperature=1.0, top_p=0.6), 3000)
    assert seen.max() == 599  # equal weights: the 600 lowest ids


def test_min_p_drops_what_is_too_far_below_the_best() -> None:
    values = np.log(np.array([0.05, 0.5, 0.15, 0.3], np.float32))
    seen = set(draws(values, SamplingSpec(seed=1, temperature=1.0, min_p=0.4), 400).tolist())
    assert seen == {1, 3}


def test_filters_apply_in_the_order_top_k_min_p_top_p() -> None:
    values = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    # top_k leaves 0.4 and 0.3; half of what is left is reached by the first alone.
    assert set(draws(values, SamplingSpec(seed=1, top_k=2, top_p=0.5), 200).tolist()) == {0}


def test_logit_bias_forces_and_forbids() -> None:
    values = logits()
    best = int(values.argmax())
    forced = SamplingSpec(seed=1, temperature=0.0, logit_bias=((3, 100.0),))
    assert sample(values, forced, 0, TokenHistory.of(())).token_id == 3
    forbidden = SamplingSpec(seed=1, temperature=1.0, logit_bias=((best, -100.0),))
    assert best not in draws(values, forbidden, 500)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    values = np.array([4.0, 3.0, -1.0, -1.5], np.float32)
    spec = SamplingSpec(seed=1, temperature=0.0, repetition_penalty=2.0)
    assert sample(values, spec, 0, TokenHistory.of((0,))).token_id == 1
    assert sample(values, spec, 1, TokenHistory.of((0,), (1,))).token_id == 0  # 2.0 against 1.5
    negative = np.array([-1.0, -1.5], np.float32)
    assert sample(negative, spec, 0, TokenHistory.of((0,))).token_id == 1  # -2.0 against -1.5


def test_presence_and_frequency_penalties_count_output_only() -> None:
    values = np.array([2.0, 1.5, 0.0], np.float32)
    presence = SamplingSpec(seed=1, temperature=0.0, presence_penalty=1.0)
    assert sample(values, presence, 0, TokenHistory.of((0, 0, 0))).token_id == 0
    assert sample(values, presence, 1, TokenHistory.of((), (0,))).token_id == 1
    frequency = SamplingSpec(seed=1, temperature=0.0, frequency_penalty=0.3)
    assert sample(values, frequency, 1, TokenHistory.of((), (0,))).token_id == 0
    assert sample(values, frequency, 2, TokenHistory.of((), (0, 0))).token_id == 1


def test_logprobs_are_those_of_the_unprocessed_logits() -> None:
    values = logits()
    spec = SamplingSpec(seed=1, temperature=0.3, top_k=1, logit_bias=((3, 100.0),), logprobs=3)
    sampled = sample(values, spec, 0, TokenHistory.of(()))
    expected = np.log(probabilities(values, 1.0))
    assert sampled.token_id == 3
    assert sampled.logprob == pytest.approx(expected[3], abs=1e-5)
    best = np.argsort(-values, kind="stable")[:3]
    assert [token_id for token_id, _ in sampled.top] == best.tolist()
    assert [value for _, value in sampled.top] == pytest.approx(expected[best].tolist(), abs=1e-5)


def test_processing_leaves_the_logits_unchanged() -> None:
    values = logits()
    before = values.copy()
    spec = SamplingSpec(seed=1, top_p=0.9, min_p=0.01, top_k=50, repetition_penalty=1.3, presence_penalty=0.5,
                        logit_bias=((1, 2.0),), logprobs=5)  # fmt: skip
    sample(values, spec, 3, TokenHistory.of((5, 6), (7, 7)))
    assert np.array_equal(values, before)


@pytest.mark.parametrize("temperature", [1e-6, 1e-4, 2.0])
def test_extreme_temperatures_still_give_a_token(temperature: float) -> None:
    values = logits() * 100
    assert 0 <= sample(values, SamplingSpec(seed=1, temperature=temperature), 0, TokenHistory.of(())).token_id < VOCAB
