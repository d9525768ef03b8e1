"""The token loop's benchmark runs at its small size and says something."""

from bench import bench_tokenloop


def test_the_benchmark_of_the_token_loop_runs() -> None:
    results = bench_tokenloop.main(["--small"])
    assert [result.rows for result in results] == list(bench_tokenloop.SMALL.rows)
    # A bound on the kind of fault that it is there to find (a wake-up or a lock per token and
    # row), not on the ratio: the small model's step is shorter than the noise of a busy machine.
    assert all(result.added_cpu_us_per_token < 3000 for result in results)
