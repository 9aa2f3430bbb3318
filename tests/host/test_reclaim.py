"""Every story on both tree cores, with pages of 1 and of 16, and with SGLang's sorted and unsorted free lists."""

from collections.abc import Callable
from functools import partial

import pytest

from tests.host import stories, stories_packing, stories_sharing, stories_trouble
from tests.host.pools import publish_settings
from tests.host.world import World

publish_settings()
STORIES = [*stories.STORIES, *stories_sharing.STORIES, *stories_trouble.STORIES, *stories_packing.STORIES]


def make_world(
    core: str, page_size: int, need_sort: bool = False, *, pages: int, chunk: int, layout: str = "reclaim"
) -> World:
    return World(
        core, page_size, pages * page_size, chunk=chunk * page_size, layout=layout, need_sort=need_sort, context=8192
    )


@pytest.mark.parametrize(
    ("core", "page_size", "need_sort"),
    [("rust", 1, False), ("python", 1, True), ("rust", 16, True), ("python", 16, False)],
)
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_reclaim(story: Callable, core: str, page_size: int, need_sort: bool) -> None:
    story(partial(make_world, core, page_size, need_sort))
