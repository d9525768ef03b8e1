"""Format and memory of the log."""

import asyncio
import json
import logging
import sys

from mlx_isolate_supervisor.telemetry.logs import (
    BOOK_LINES_MAX,
    EventFormatter,
    JsonFormatter,
    LogBook,
)


def record(event: str = "engine.ready", **facts: object) -> logging.LogRecord:
    made = logging.LogRecord("x", logging.INFO, "f.py", 1, event, None, None)
    made.event = event
    made.facts = facts
    return made


def test_an_event_is_one_line_with_its_facts() -> None:
    line = EventFormatter(with_date=False).format(
        record(model="m", load_s=2.3456, pid=7, reason="it is so", gone=None)
    )
    assert line.split(" ", 1)[1] == (
        'INFO    engine.ready model=m load_s=2.346 pid=7 reason="it is so"'
    )


def test_a_fact_cannot_break_the_line() -> None:
    line = EventFormatter(with_date=False).format(record(reason="a\nb\x1b[31m"))
    assert "\n" not in line
    assert "\x1b" not in line


def test_an_engines_line_is_tagged_with_model_and_incarnation() -> None:
    line = EventFormatter(with_date=False).format(
        record("engine.line", model="m", incarnation=3, line="hello")
    )
    assert line.endswith(" m#3 | hello")


def test_a_record_of_another_library_keeps_its_message() -> None:
    foreign = logging.LogRecord("aiohttp", logging.WARNING, "f.py", 1, "odd %s", ("x",), None)
    assert EventFormatter(with_date=False).format(foreign).endswith("WARNING odd x")


def test_the_book_keeps_the_last_lines_of_everything_and_of_each_model() -> None:
    book = LogBook()
    book.track(["m"])
    book.handle(record("a.b", model="m"))
    for number in range(BOOK_LINES_MAX + 5):
        book.handle(record("c.d", number=number))
    assert len(book.tail()) == BOOK_LINES_MAX
    assert len(book.tail(3)) == 3
    assert len(book.tail(model="m")) == 1
    assert book.tail(model="unknown") == []


def test_a_model_that_is_tracked_no_more_leaves_nothing_behind() -> None:
    book = LogBook()
    book.track(["kept", "gone"])
    book.handle(record("a.b", model="kept"))
    book.handle(record("a.b", model="gone"))
    book.track(["kept", "new"])
    book.handle(record("c.d", model="kept"))
    assert len(book.tail(model="kept")) == 2
    assert book.tail(model="gone") == []
    assert len(book.tail()) == 3


async def _follow() -> list[list[str]]:
    book = LogBook()
    book.handle(record("a.b", n=1))
    seen: list[list[str]] = []

    async def read() -> None:
        async for lines in book.follow(10):
            seen.append([line.rsplit(" ", 1)[1] for line in lines])
            if len(seen) == 1:
                book.handle(record("a.b", n=2))
                book.handle(record("a.b", n=3))
            else:
                book.end()

    await asyncio.wait_for(read(), 5)
    return seen


def test_a_follower_gets_old_lines_then_new_ones_until_the_end() -> None:
    assert asyncio.run(_follow()) == [["n=1"], ["n=2", "n=3"]]


def test_bytes_that_are_no_text_are_shown_and_harm_no_reader() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "at %s", ("\udcff",), None)
    assert EventFormatter(with_date=True).format(record).endswith("at \\udcff")


def test_json_holds_the_facts_as_they_are_and_stays_one_line() -> None:
    made = record(model="m", load_s=2.5, gone=None, reason="a\nb\x1b\x9b\udcff", urls=("u",))
    try:
        raise OSError("two\nlines")
    except OSError:
        made.exc_info = sys.exc_info()
    text = JsonFormatter().format(made)
    assert text.isascii() and text.isprintable()
    line = json.loads(text)
    assert line["time"].endswith("Z") and line["level"] == "INFO"
    assert line["event"] == "engine.ready"
    assert (line["model"], line["load_s"], line["urls"]) == ("m", 2.5, ["u"])
    assert "gone" not in line
    assert "OSError: two" in line["traceback"]
