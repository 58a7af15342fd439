"""What a report is written as: told by the ending of its file's name, before anything is loaded that writes it."""

from __future__ import annotations

from pathlib import Path

from sentinel.errors import ConfigError

HTML, MARKDOWN, PDF = "html", "md", "pdf"
FORMS = {".html": HTML, ".htm": HTML, ".md": MARKDOWN, ".markdown": MARKDOWN, ".pdf": PDF}
"""Ending of a file's name -> what is written into it."""


def form_of(path: Path) -> str:
    """Return what a file is to hold, by the ending of its name. ConfigError for one that is none of ours."""
    form = FORMS.get(path.suffix.lower())
    if form is None:
        raise ConfigError(f'-o {path}: expected a name that ends with {", ".join(FORMS)}, got "{path.suffix or path.name}"')
    return form
