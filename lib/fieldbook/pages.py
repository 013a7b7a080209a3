"""Pages: the one place that fills a template of templates/."""

from typing import Any

from .templates.headings import both, translations
from .templates.offline import EVIDENCE, TEMPLATES


def page(template: str, **content: Any) -> str:
    """A filled template as text. Everything is escaped but what is Markup; a name that a template lacks raises jinja2.UndefinedError."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(TEMPLATES)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters |= {"both": both, "chinese": translations().get}
    return environment.get_template(template).render(evidence=EVIDENCE, **content)
