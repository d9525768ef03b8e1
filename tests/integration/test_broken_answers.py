"""Client commands before something that breaks off its answer, or answers something else."""

import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from mlx_isolate_supervisor import exit_codes
from mlx_isolate_supervisor.cli import main

HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"


@contextmanager
def answering(answer: bytes) -> Generator[str]:
    """A server that says `answer` to whoever connects, and hangs up; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client:
                    # A connection without a request is the one that ends this.
                    if client.recv(65536):
                        client.sendall(answer)
                    else:
                        return

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            socket.create_connection(listener.getsockname()).close()
            thread.join()


@pytest.mark.parametrize("command", ["ps", "status", "logs", "top", "load x", "unload x"])
def test_an_answer_that_breaks_off_is_told_in_one_line(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(HEAD % 1000 + b'{"models": [') as url:
        assert main([*command.split(), "--url", url]) == exit_codes.FAILED
    told = capsys.readouterr().err
    assert told.startswith("mlx-isolate: the answer of the daemon at ")
    assert len(told.splitlines()) == 1


def test_top_says_that_something_else_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(HEAD % 2 + b"[]") as url:
        assert main(["top", "--once", "--url", url]) == exit_codes.FAILED
    assert "is not mlx-isolate, or of another version" in capsys.readouterr().err
