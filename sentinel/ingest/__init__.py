"""From frames of many ranks to closed steps: follow, assemble, merge. Knows no rules."""
