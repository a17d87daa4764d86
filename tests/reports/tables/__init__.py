"""The reports by subject."""

from tests.reports.tables import (
    caches,
    drafts,
    images,
    life_cycle,
    sampling,
    scheduling,
    sessions,
    thinking,
)

REPORTS = (
    *sampling.REPORTS,
    *scheduling.REPORTS,
    *drafts.REPORTS,
    *caches.REPORTS,
    *life_cycle.REPORTS,
    *sessions.REPORTS,
    *images.REPORTS,
    *thinking.REPORTS,
)
