"""Pods for tests: one backend per launcher and session folder; tests that need rights carry the marker `pods`."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from etude.environments.backends.namespace import NamespaceBackend
from etude.environments.client import AgentPod
from etude.environments.pod import PodSpec
from etude.records.errors import MissingCapability


@pytest.fixture(scope="session")
def pod_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pods")


async def _backend(cache: Path, launcher: str, **options: object) -> NamespaceBackend:
    try:
        return await NamespaceBackend.open(cache, launcher=launcher, **options)  # type: ignore[arg-type]
    except MissingCapability as error:
        pytest.skip(str(error))


@pytest_asyncio.fixture
async def backend(pod_cache: Path) -> AsyncIterator[NamespaceBackend]:
    made = await _backend(pod_cache, "auto")
    yield made
    await made.aclose()


@pytest_asyncio.fixture(params=["c", "python"])
async def either_backend(request: pytest.FixtureRequest, pod_cache: Path) -> AsyncIterator[NamespaceBackend]:
    made = await _backend(pod_cache, request.param)
    yield made
    await made.aclose()


@pytest_asyncio.fixture
async def pod(backend: NamespaceBackend) -> AgentPod:
    return await backend.create(PodSpec())


@pytest.fixture
def root_only() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("needs root")
