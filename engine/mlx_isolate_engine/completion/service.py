"""The completion service: prepares requests against the model and runs them on its thread."""

import functools

from mlx_isolate_engine.cache.namespace import namespace_of
from mlx_isolate_engine.completion.constraints import ConstraintCompiler
from mlx_isolate_engine.completion.executor import AdmittedCompletion
from mlx_isolate_engine.completion.grammar_vocabulary import grammar_vocabulary
from mlx_isolate_engine.completion.late_vocabulary import LateVocabulary
from mlx_isolate_engine.completion.prompt import (
    BuiltPrompt,
    PromptBuilder,
    context_length_exceeded,
)
from mlx_isolate_engine.completion.request import ChatPrompt, CompletionRequest
from mlx_isolate_engine.completion.resolve import (
    check_adapter,
    check_request,
    resolve_draft_tokens,
    resolve_max_tokens,
    resolve_sampling,
)
from mlx_isolate_engine.completion.seam import PreparedCompletion
from mlx_isolate_engine.completion.workers import Workers
from mlx_isolate_engine.generation.plan import (
    CallConstraint,
    CompletionPlan,
    Constraint,
    TextPlan,
)
from mlx_isolate_engine.generation.thread import GenerationThread
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.errors import CapacityError, RequestError

AnyConstraint = Constraint | CallConstraint | None

# Threads that render and tokenize; more than one, so that a 5 MB text does not stop a short chat.
PREPARE_THREADS = 4
# Longest time for one prompt: a template that never ends is interrupted after it.
PREPARE_DEADLINE_S = 60.0
# Of tools that are declared strict, where the model's calls cannot be held to a schema.
NOT_STRICT = "'strict' is not enforced: this model does not write its calls as JSON."
# When to ask again for a vocabulary that has taken so long already.
VOCABULARY_RETRY_S = 10.0


class ModelCompletionService:
    """Implements `CompletionService` for the model of one started generation thread.

    Use on the event loop on which the thread was started::

        thread = GenerationThread(settings, lambda: load_model(folder, settings, report))
        loaded = await thread.start()
        service = ModelCompletionService(thread, settings)
        ...
        await service.close()  # refuses new work, waits for nothing
        await thread.stop()

    Args:
        thread: started.
        settings: the engine's.
        prepare_deadline_s: seconds for rendering and tokenizing one prompt.
    """

    def __init__(
        self,
        thread: GenerationThread,
        settings: EngineSettings,
        *,
        prepare_deadline_s: float = PREPARE_DEADLINE_S,
    ) -> None:
        facts = thread.loaded.facts
        self._thread = thread
        self._settings = settings
        self._context_length = facts.context_length
        self._vocabulary_size = thread.vocabulary_size
        self._workers = Workers(PREPARE_THREADS, prepare_deadline_s)
        self._builder = PromptBuilder(
            thread.loaded.tokenizer,
            template_args=settings.chat_template_args,
            use_default_template=settings.use_default_chat_template,
            context_length=facts.context_length,
            checkpoint_kinds=thread.checkpoint_kinds,
        )
        tokenizer, size = thread.loaded.tokenizer, thread.vocabulary_size
        self._prepare_deadline_s = prepare_deadline_s
        self._vocabulary = LateVocabulary(lambda: grammar_vocabulary(tokenizer, size))
        self._compiler = ConstraintCompiler(tokenizer, size, self._vocabulary.result)
        self._places_max = max(1, settings.decode_concurrency) + settings.engine_queue_max
        self._places = 0
        self._is_closed = False
        self._built: tuple[str, tuple[BuiltPrompt, AnyConstraint]] | None = None

    @property
    def places_taken(self) -> int:
        """Completions prepared and neither ended nor closed; 0 when idle."""
        return self._places

    async def prepare(self, request: CompletionRequest) -> PreparedCompletion:
        """See `CompletionService.prepare`."""
        self._take_place()
        self._thread.counters.coming += 1
        try:
            plan = await self._plan(request)
        except BaseException:
            self._thread.counters.coming -= 1
            self._give_place_back()
            raise
        notices = (NOT_STRICT,) if self._compiler.leaves_strict_calls_free(request) else ()
        return AdmittedCompletion(
            plan, self._thread, self._settings, self._give_place_back, notices
        )

    async def count_tokens(self, request: CompletionRequest) -> int:
        """See `CompletionService.count_tokens`."""
        return len((await self._build(request)).plan.tokens)

    async def close(self) -> None:
        """Stop admission and the worker threads; running completions go on."""
        self._is_closed = True
        self._workers.close()

    def _take_place(self) -> None:
        if self._is_closed:
            raise CapacityError(
                "The engine is stopping.", status=503, code="engine_stopping", retry_after_s=1
            )
        if self.places_taken >= self._places_max:
            raise CapacityError(
                f"The engine's queue is full ({self._places_max} requests).",
                status=429,
                code="queue_full",
                retry_after_s=1,
            )
        self._places += 1

    def _give_place_back(self) -> None:
        self._places -= 1

    async def _plan(self, request: CompletionRequest) -> CompletionPlan:
        check_request(request)
        check_adapter(request.adapter, self._thread.adapters)
        sampling = resolve_sampling(request.sampling, self._settings, self._vocabulary_size)
        resolve_max_tokens(request.max_tokens, self._settings, 0, self._context_length)
        prompt, constraint = await self._build_once(request)
        self._check_tokens(prompt.plan.tokens, request.prompt.param)
        draft_tokens = resolve_draft_tokens(
            request, self._settings, can_draft=self._thread.has_draft and constraint is None
        )
        return CompletionPlan(
            request_id=request.request_id,
            prompt=prompt.plan,
            max_tokens=resolve_max_tokens(
                request.max_tokens,
                self._settings,
                len(prompt.plan.tokens),
                self._context_length,
            ),
            sampling=sampling,
            text=self._text_plan(request, prompt),
            constraint=constraint,
            group=request.group,
            choices=request.choices,
            adapter=request.adapter,
            draft_tokens=draft_tokens,
            namespace=namespace_of(
                self._settings,
                draft=bool(draft_tokens),
                adapter=self._thread.adapters.get(request.adapter or ""),
            ),
            placement=self._thread.placement,
        )

    async def _build_once(self, request: CompletionRequest) -> tuple[BuiltPrompt, AnyConstraint]:
        """Prompt and grammar; the choices of one request, prepared in a row, share them."""
        if request.group is not None and self._built is not None:
            group, built = self._built
            if group == request.group:
                return built
        prompt = await self._build(request)
        built = (prompt, await self._constrain(request, prompt.initial_state))
        self._built = None if request.group is None else (request.group, built)
        return built

    async def _build(self, request: CompletionRequest) -> BuiltPrompt:
        try:
            return await self._workers.run(functools.partial(self._builder.build, request))
        except TimeoutError as error:
            raise RequestError(
                "The chat template took too long for these messages.",
                param=request.prompt.param,
                code="chat_template_timeout",
            ) from error

    async def _constrain(self, request: CompletionRequest, initial_state: str) -> AnyConstraint:
        if not self._compiler.is_needed(request):
            return None
        try:
            await self._vocabulary.wait(self._prepare_deadline_s)
        except TimeoutError as error:
            raise CapacityError(
                f"This model's {self._vocabulary_size} tokens are still being prepared for "
                "structured output; try again.",
                status=503,
                code="vocabulary_not_ready",
                retry_after_s=VOCABULARY_RETRY_S,
            ) from error
        try:
            return await self._workers.run(
                functools.partial(self._compiler.compile, request, initial_state)
            )
        except TimeoutError as error:
            raise RequestError(
                "The schema took too long to prepare.", code="schema_timeout"
            ) from error

    def _check_tokens(self, tokens: list[int], param: str) -> None:
        if not tokens:
            raise RequestError("The prompt is empty.", param=param)
        if len(tokens) >= self._context_length:
            raise context_length_exceeded(len(tokens), self._context_length, param)
        if not 0 <= min(tokens) <= max(tokens) < self._vocabulary_size:
            raise RequestError(
                f"This model's tokens are 0 to {self._vocabulary_size - 1}.", param=param
            )

    def _text_plan(self, request: CompletionRequest, prompt: BuiltPrompt) -> TextPlan:
        tools = request.prompt.tools if isinstance(request.prompt, ChatPrompt) else ()
        return TextPlan(
            stop=request.stop,
            initial_state=prompt.initial_state,
            split_reasoning=prompt.is_chat,
            tools=tools if tools and request.tool_choice.mode != "none" else None,
            one_call=request.tool_choice.at_most_one,
            stream_calls=request.stream,
            # What an answer goes on with may begin with a space of its own.
            trim_space=prompt.is_chat
            and not prompt.goes_on
            and self._thread.marks_start_with_space,
            top_logprobs=request.top_logprobs,
        )
