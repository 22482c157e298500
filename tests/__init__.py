"""Tests in three rings: unit (pure), api (a real socket, a fake kernel), kernel (the real thing)."""
