"""A model's tokenizer as mlx-lm wraps it, with the template that the settings ask for."""

from pathlib import Path
from typing import Any

from mlx_isolate_engine.model.errors import ModelError, first_sentence
from mlx_isolate_shared.config import EngineSettings

# For `use_default_chat_template` where the tokenizer library has no default of its own.
CHATML = """\
{%- for message in messages %}\
{{ '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') ~ '<|im_end|>\\n' }}\
{%- endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def load_tokenizer(folder: Path, settings: EngineSettings, eos: Any = None) -> Any:
    """mlx_lm's TokenizerWrapper for the folder; runs no code from it unless that is trusted.

    Args:
        folder: a checked model folder.
        settings: trust_remote_code, chat_template (text, or a file that holds it) and
            use_default_chat_template are used.
        eos: config.json's eos_token_id, an id or a list of them.

    Raises:
        ModelError: `model_broken`, `model_untrusted` or `template_broken`.
    """
    from mlx_lm.utils import load_tokenizer as load

    extra: dict[str, Any] = {
        # Explicit: with None the library asks on the terminal and waits.
        "trust_remote_code": settings.trust_remote_code,
        "local_files_only": True,
    }
    template = _template_text(settings)
    if template is not None:
        extra["chat_template"] = template
    try:
        tokenizer: Any = load(folder, extra, eos_token_ids=eos)
        if not tokenizer.has_chat_template and settings.use_default_chat_template:
            tokenizer.chat_template = getattr(tokenizer, "default_chat_template", CHATML)
            tokenizer.has_chat_template = True
    # Whatever a damaged tokenizer makes the libraries raise is the folder's fault, and the
    # tokenizers library raises bare Exception.
    except Exception as error:
        raise _translated(folder, error) from error
    return tokenizer


def _translated(folder: Path, error: Exception) -> ModelError:
    if "trust_remote_code" in str(error):
        return ModelError(
            "model_untrusted",
            f"the tokenizer of {folder} wants to run code of its own; "
            "give --trust-remote-code if you trust it.",
        )
    return ModelError(
        "model_broken", f"cannot load the tokenizer of {folder}: {first_sentence(error)}"
    )


def _template_text(settings: EngineSettings) -> str | None:
    """The template that the settings give, checked; None where they give none."""
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = settings.chat_template
    if template is None:
        return None
    try:
        if "{" not in template:
            template = Path(template).expanduser().read_text()
        environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
        environment.parse(template)
    except OSError as error:
        raise ModelError(
            "template_broken", f"cannot read the chat template {template}: {error.strerror}."
        ) from error
    except (TemplateSyntaxError, UnicodeDecodeError) as error:
        raise ModelError(
            "template_broken", f"the chat template is not valid: {first_sentence(error)}."
        ) from error
    return template
