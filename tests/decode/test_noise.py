"""Bugs these tests would catch: two names that share a stream; a draw that depends on how many were
asked for or in which order; global state; numbers of few bits (bfloat16 has 8, so that 1 comes out
and small ones never do); 1.0 itself; a stream that changes with the version.

The uniformity bounds are those of a chi-square with 63 degrees of freedom at p = 1e-6 (131.4); the
streams are fixed, so nothing here can fail by chance.
"""

import random
from itertools import product

import numpy as np
import torch

from decode.noise import PhiloxNoise


def test_streams_are_the_same_forever() -> None:
    """Written down once: a text must come out again after an update."""
    first = [0.26545040221078253, 0.6315611547749825]
    assert PhiloxNoise(7).uniforms("a", 3, "draft", 2) == first


def test_every_part_of_a_name_makes_another_stream() -> None:
    names = list(product((0, 1, 2**40), ("a", "b", "a1", ""), (0, 1, 2**33), ("draft", "verify")))
    draws = [
        x
        for seed, *rest in names
        for x in PhiloxNoise(seed).uniforms(rest[0], rest[1], rest[2], 17)
    ]
    assert len(set(draws)) == len(names) * 17


def test_a_draw_depends_on_its_name_alone() -> None:
    noise = PhiloxNoise(1)
    longest = noise.uniforms("r", 5, "verify", 17)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    for count in (17, 1, 4, 0):
        noise.uniforms("other", 5, "verify", 3)
        assert noise.uniforms("r", 5, "verify", count) == longest[:count]
    assert PhiloxNoise(1).uniforms("r", 5, "verify", 17) == longest


def test_numbers_fill_the_unit_interval_finely() -> None:
    draws = np.array([PhiloxNoise(0).uniforms("r", step, "draft", 16) for step in range(4000)])
    assert draws.min() >= 0
    assert draws.max() < 1
    assert len(np.unique(draws)) == draws.size  # 32 bits would repeat now and then, 8 all the time
    assert draws.min() < 1e-4
    scaled = draws * 2.0**53
    assert (scaled == np.floor(scaled)).all()
    assert 0.49 < (scaled % 2).mean() < 0.51  # the lowest bit is alive
    for column in (draws[:, 0], draws[:, 15], draws.ravel()):
        counts = np.histogram(column, bins=64, range=(0, 1))[0]
        expected = column.size / 64
        assert ((counts - expected) ** 2 / expected).sum() < 131.4


def test_neighbouring_streams_are_not_alike() -> None:
    first = np.array([PhiloxNoise(0).uniforms("r", step, "draft", 1)[0] for step in range(4000)])
    second = np.array([PhiloxNoise(0).uniforms("r", step, "verify", 1)[0] for step in range(4000)])
    for a, b in ((first[1:], first[:-1]), (first, second)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(4000)  # five standard deviations
