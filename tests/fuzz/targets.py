"""Everything that is fed, by name; and how many of a million inputs each gets, by what it costs."""

from __future__ import annotations

from tests.fuzz import files
from tests.fuzz.answers import answer_text, countdown_answers, mathematics
from tests.fuzz.replies import replies

TARGETS = {
    'mathematics': (mathematics, 40_000),
    'answer_text': (answer_text, 120_000),
    'countdown': (countdown_answers, 280_000),
    'rows': (files.rows, 150_000),
    'tables': (files.tables, 50_000),
    'replies': (replies, 200_000),
    'manifests': (files.manifests, 40_000),
    'model_config': (files.model_config, 50_000),
    'run_config': (files.run_config, 25_000),
    'metrics': (files.metrics, 40_000),
    'checkpoints': (files.checkpoints, 2_500),
    'lock_file': (files.lock_file, 2_500),
}
