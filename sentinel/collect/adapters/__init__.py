"""Adapters: one file a trainer, each of them imported only by those who use that trainer (`sentinel.ADAPTERS`)."""
