"""What a person sees while `serve` runs: plain lines, and one bar line while models load.

The bar is drawn on a terminal only. It is drawn by hand: a library for it would cost the process
that must stay small more memory than all of its own code.
"""

import os
import sys
from collections.abc import Sequence
from typing import TextIO

from mlx_isolate_shared.wire import Loading, ModelFacts
from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.harmless import harmless
from mlx_isolate_supervisor.settings.quantities import show_bytes, show_seconds
from mlx_isolate_supervisor.telemetry.logs import Logs

BAR_CELLS = 24
_CLEAR_LINE = "\r\x1b[K"


def describe_facts(facts: ModelFacts) -> str:
    """`gemma3_text, 268M parameters, float32, context 32768, cpu with OpenBLAS`."""
    parts = [facts.architecture, f"{_show_count(facts.parameters)} parameters", facts.dtype]
    if facts.context_length:
        parts.append(f"context {facts.context_length}")
    parts.append(f"{facts.backend} with {facts.blas}" if facts.blas else facts.backend)
    return ", ".join(part for part in parts if part)


def describe_ready(model: str, load_s: float | None, facts: ModelFacts | None) -> str:
    """The line that says that a model is served."""
    took = f" in {show_seconds(load_s)}" if load_s is not None else ""
    return f"{model}: ready{took}" + (f" ({describe_facts(facts)})" if facts else "")


def describe_place(urls: Sequence[str], wildcards: Sequence[str]) -> str:
    """Where the daemon listens.

    Args:
        urls: what a person on this machine can open.
        wildcards: addresses that it was bound to and that stand for all of this machine's.
    """
    place = ", ".join(urls)
    if wildcards:
        place += f" and every other address of this machine ({', '.join(wildcards)})"
    return place


def describe_start(version: str, place: str, url: str, models: Sequence[ModelSpec]) -> str:
    """The first lines: who listens where, for which models, and which of them wait to be asked.

    Args:
        place: see describe_place.
        url: below which the page lies.
    """
    lines = [f"mlx-isolate {version} on {place} (pid {os.getpid()})"]
    for model in models:
        source = "" if model.model == model.id else f"  {model.model}"
        later = "" if model.preload else "  (loads on first use)"
        lines.append(f"  {model.id}{source}{later}")
    return "\n".join([*lines, f"  page: {url}/ui"])


def draw_loading(loading: dict[str, Loading], *, columns: int, plain: bool) -> str:
    """One line for all models that load, cut to the terminal's width.

    Args:
        loading: the last step of each.
        columns: width of the terminal.
        plain: draw with ASCII.
    """
    full, empty = ("#", "-") if plain else ("━", "─")
    parts: list[str] = []
    for model, step in loading.items():
        bar = ""
        if step.fraction is not None:
            share = min(1.0, max(0.0, step.fraction))
            filled = round(share * BAR_CELLS)
            bar = f" {full * filled}{empty * (BAR_CELLS - filled)} {share:4.0%}"
        detail = f" {step.detail}" if step.detail else ""
        parts.append(harmless(f"{model}: {step.stage}{bar}{detail}"))
    return "   ".join(parts)[: max(0, columns - 1)]


def _show_count(number: int) -> str:
    return show_bytes(number).removesuffix("B").replace(" ", "").replace("G", "B")


class Display:
    """Lines on `out`; the bar on `terminal`, which is None where there is none.

    Args:
        out: where lines go.
        terminal: a stream that is a terminal, or None.
    """

    def __init__(self, out: TextIO, terminal: TextIO | None) -> None:
        self._out = out
        self._terminal = terminal
        self._loading: dict[str, Loading] = {}
        self._is_bar_shown = False
        encoding = (terminal.encoding if terminal else "") or ""
        self._plain = "utf" not in encoding.lower()

    def line(self, text: str) -> None:
        """Print one line, above the bar."""
        self.hide_bar()
        try:
            print(text, file=self._out, flush=True)
        except OSError:
            pass  # the terminal or the reader has gone; the log has the facts
        self._draw()

    def loading(self, model: str, step: Loading) -> None:
        """A load moved: redraw the bar, or print a line for each new stage."""
        before = self._loading.get(model)
        self._loading[model] = step
        if self._terminal is not None:
            self._draw()
        elif before is None or before.stage != step.stage:
            self.line(harmless(f"{model}: loading ({step.stage})"))

    def loaded(self, model: str) -> None:
        """A load ended, whichever way."""
        if self._loading.pop(model, None) is not None:
            self.hide_bar()
            self._draw()

    def hide_bar(self) -> None:
        """Clear the bar, so that something else can be written in its place."""
        if self._is_bar_shown and self._terminal is not None:
            self._write(_CLEAR_LINE)
            self._is_bar_shown = False

    def _draw(self) -> None:
        if self._terminal is None or not self._loading:
            return
        try:
            columns = os.get_terminal_size(self._terminal.fileno()).columns or 80
        except OSError:
            columns = 80
        self._write(_CLEAR_LINE + draw_loading(self._loading, columns=columns, plain=self._plain))
        self._is_bar_shown = True

    def _write(self, text: str) -> None:
        assert self._terminal is not None
        try:
            self._terminal.write(text)
            self._terminal.flush()
        except OSError:
            self._terminal = None


def make_display(logs: Logs) -> Display:
    """The display for this process's own streams; log lines on a terminal go above its bar.

    On a terminal the console shows warnings only, unless everything was asked for: the display
    tells the rest in a person's words, and the log has it all.
    """
    terminal = logs.outlet.stream(sys.stderr) if sys.stderr.isatty() else None
    display = Display(logs.outlet.stream(sys.stdout), terminal)
    if terminal is not None:
        logs.console.before_line = display.hide_bar
        logs.show_on_terminal()
    return display
