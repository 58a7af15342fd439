"""Rule packs: what is watched, by which detector, how severe it is; and the engine that applies them."""
