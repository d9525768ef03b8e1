"""What happens in a soak and when, drawn from a seed: requests, deaths and reloads; pure."""

import hashlib
import random
from typing import Literal

import msgspec

Kind = Literal["plain", "long", "tools", "aborted", "stalled", "malformed"]
Api = Literal["chat", "completions", "messages", "responses"]
Death = Literal["SIGKILL", "SIGSEGV", "SIGABRT", "exit 1", "SIGSTOP", "out of memory"]
Change = Literal["temp", "alias", "limit", "broken", "nothing"]

MODELS = ("full", "sliding", "parrot")
STANDBY = "standby"
# How often each comes, in parts of all.
KINDS: dict[Kind, int] = {
    "plain": 44,
    "long": 12,
    "tools": 10,
    "aborted": 14,
    "stalled": 6,
    "malformed": 14,
}
APIS: dict[Api, int] = {"chat": 5, "completions": 2, "messages": 2, "responses": 2}
DEATHS: tuple[Death, ...] = (
    *("SIGKILL", "SIGKILL", "SIGSEGV", "SIGABRT", "exit 1", "SIGSTOP", "out of memory"),
)
CHANGES: tuple[Change, ...] = ("temp", "alias", "limit", "broken", "nothing")
# How many prompts there are for each model, and how many of them are long.
PROMPTS, LONG_PROMPTS = 8, 3
# Limits of answers: as many tokens as the oracle is asked for, and more than any parrot says.
SHORT_TOKENS = (1, 4, 16, 40, 64)
LONG_TOKENS = 1500
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One client.

    Attributes:
        at_s: seconds since the start.
        prompt: which of the model's prompts.
        tokens: limit of its answer.
        events: after how many events an aborting client leaves, or a stalled one stops to read.
        pause_s: how long a stalled client does not read; how long an aborting one stays at most.
        resets: whether it leaves by RST instead of FIN.
        variant: which kind of nonsense a malformed one is.
    """

    at_s: float
    kind: Kind
    model: str
    api: Api
    stream: bool
    prompt: int
    tokens: int
    events: int
    pause_s: float
    resets: bool
    variant: int


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """One death: of a model's engine, or of the spare one."""

    at_s: float
    how: Death
    target: str


class Reload(msgspec.Struct, frozen=True, kw_only=True):
    """One SIGHUP, after a change to the configuration file."""

    at_s: float
    change: Change
    model: str
    number: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All of a soak, each list in the order of time."""

    seed: int
    duration_s: float
    requests: tuple[Request, ...]
    acts: tuple[Act, ...]
    reloads: tuple[Reload, ...]

    @property
    def digest(self) -> str:
        """Short hash of all of it: equal for equal plans."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:12]


def make_plan(
    seed: int, duration_s: float, request_every_s: float, kill_every_s: float, reload_every_s: float
) -> Plan:
    """Everything arrives at random, independently, at the given mean distances."""
    chance = random.Random(seed)
    first_s = min(5.0, duration_s / 4)
    return Plan(
        seed=seed,
        duration_s=duration_s,
        requests=tuple(
            _request(chance, at) for at in _arrivals(chance, 0.0, duration_s, request_every_s)
        ),
        acts=tuple(_acts(chance, list(_arrivals(chance, first_s, duration_s, kill_every_s)))),
        reloads=tuple(
            Reload(
                at_s=at, change=chance.choice(CHANGES), model=chance.choice(MODELS), number=number
            )
            for number, at in enumerate(_arrivals(chance, first_s, duration_s, reload_every_s))
        ),
    )


def prompt_texts(seed: int, model: str) -> tuple[str, ...]:
    """The prompts for one model: the short ones first, and some begin alike.

    No run of characters comes twice, so that a parrot cannot lose its place.
    """
    chance = random.Random(f"{seed} {model}")
    shared = "".join(chance.choices(LETTERS, k=60))
    texts: list[str] = []
    for number in range(PROMPTS):
        is_long = number >= PROMPTS - LONG_PROMPTS
        size = chance.randrange(300, 600) if is_long else chance.randrange(8, 120)
        own = "".join(chance.choices(LETTERS, k=size))
        texts.append(shared + own if number % 2 else own)
    return tuple(texts)


def _arrivals(
    chance: random.Random, first_s: float, end_s: float, every_s: float
) -> tuple[float, ...]:
    times: list[float] = []
    now = first_s
    while (now := now + chance.expovariate(1.0 / every_s)) < end_s:
        times.append(round(now, 3))
    return tuple(times)


def _request(chance: random.Random, at_s: float) -> Request:
    kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
    api = chance.choices(list(APIS), list(APIS.values()))[0]
    model = chance.choice(MODELS)
    if kind in ("tools", "stalled"):
        # The parrot's answers are as long as asked for, and may be calls.
        model, api = "parrot", "chat"
    if model == "parrot" and api == "completions":
        api = "chat"
    from_prompt = PROMPTS - LONG_PROMPTS if kind in ("long", "stalled") else 0
    return Request(
        at_s=at_s,
        kind=kind,
        model=model,
        api=api,
        stream=kind in ("aborted", "stalled") or chance.random() < 0.6,
        prompt=chance.randrange(from_prompt, PROMPTS),
        tokens=LONG_TOKENS if kind in ("tools", "stalled") else chance.choice(SHORT_TOKENS),
        events=chance.choice((0, 1, 2, 5, 20)),
        pause_s=round(chance.uniform(0.05, 6.0), 2),
        resets=chance.random() < 0.5,
        variant=chance.randrange(1000),
    )


def _acts(chance: random.Random, times: list[float]) -> list[Act]:
    """Every way to die as often as the next, in random order, at random targets."""
    ways: list[Death] = []
    while len(ways) < len(times):
        ways += chance.sample(DEATHS, len(DEATHS))
    targets = [*MODELS] * 3 + [STANDBY]
    return [
        Act(at_s=at, how=how, target=chance.choice(targets))
        for at, how in zip(times, ways, strict=False)
    ]
