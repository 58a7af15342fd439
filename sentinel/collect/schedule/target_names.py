"""How targets may name a module or a parameter."""

from __future__ import annotations


class TargetNames:
    """Knows which of several models each chunk belongs to: its names may then begin with the model's."""

    def __init__(self) -> None:
        self.models: dict[int, str] = {}
        """Number of a chunk -> name of its model, of several."""

    def of(self, name: str, chunk: int) -> tuple[str, ...]:
        """Return how targets may name a module or parameter of a chunk, known by its local name."""
        model = self.models.get(chunk)
        return (name, f"{model}.{name}" if name else model) if model else (name,)
