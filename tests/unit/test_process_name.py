"""The arguments that `ps` shows once a standby has become a model's engine."""

from mlx_isolate_engine.process_name import renamed_arguments

SHOWN = b"python\0-m\0engine\0--id\0standby\0--incarnation\x003\0--spec-fd\x007\0"


def test_the_name_takes_the_place_of_the_standbys_in_as_many_bytes() -> None:
    renamed = renamed_arguments(SHOWN, "gemma", 12)
    assert renamed is not None and len(renamed) == len(SHOWN)
    assert renamed.rstrip(b"\0").split(b"\0") == [
        *(b"python", b"-m", b"engine", b"--id", b"gemma", b"--incarnation", b"12")
    ]


def test_a_long_name_is_cut_and_never_longer_than_its_room() -> None:
    renamed = renamed_arguments(SHOWN, "m" * 500, 1)
    assert renamed is not None and len(renamed) == len(SHOWN)
    assert renamed.endswith(b"m\0--incarnation\x001\0")


def test_other_arguments_are_left_alone() -> None:
    assert renamed_arguments(b"python\0-c\0pass\0", "m", 1) is None
