# One image for all stages; compose.yaml runs it once for each. docs/containers.md says how to build and use it.
#
#   build    a virtual environment from prebuilt wheels alone, so that no stage has a compiler
#   the rest that environment, the one system library it needs, and a user who may write to two directories

ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build

# pip reads these two by itself. They are where packages come from, and stay out of the image.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# The build without CUDA, by its full name: where no index has it this fails at once, instead of fetching gigabytes.
ARG TORCH=2.13.0+cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ONLY_BINARY=:all:

WORKDIR /src
RUN python -m venv /opt/sluice && /opt/sluice/bin/pip install "torch==${TORCH}"
# What changes with every commit comes last: a new build then fetches no package again.
COPY pyproject.toml ./
RUN python -c 'import tomllib as t; print(*t.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
        > requirements.txt \
    && /opt/sluice/bin/pip install --requirement requirements.txt
COPY LICENSE README.md Procfile ./
COPY kv_store kv_store
COPY pipeline pipeline
COPY stages stages
COPY ops ops
RUN /opt/sluice/bin/pip install --no-deps .

FROM ${BASE}

# numba's threads run on the system's OpenMP; torch brings one of its own. Debian keeps a single version of it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 sluice \
    && useradd --uid 10001 --gid 10001 --home-dir /var/lib/sluice --no-create-home --shell /usr/sbin/nologin sluice \
    && install --directory --owner=sluice --group=sluice --mode=0700 /var/lib/sluice /run/sluice /run/sluice/kv

COPY --from=build /opt/sluice /opt/sluice

# PYTHONSAFEPATH: code comes from the environment, never from a directory that happens to be the current one.
ENV PATH=/opt/sluice/bin:${PATH} PYTHONSAFEPATH=1 SLUICE_HOME=/var/lib/sluice SLUICE_KV_POOL_DIR=/run/sluice/kv
USER 10001:10001
WORKDIR /var/lib/sluice

# Without a stage's name it looks at whichever stage runs in the container. It only looks; see ops/health.py.
HEALTHCHECK --interval=30s --timeout=10s --start-period=300s --retries=3 CMD ["python", "-m", "ops.health"]
CMD ["sluice", "--help"]
