# Images that serve with vLLM and this plugin; docs/start/ascend.md says how to build them.
#
#   docker build --target ascend --build-arg SOC=a3 --tag vllm-npu-prep:ascend .
#   docker build --target cpu --tag vllm-npu-prep:cpu .
#
# Build arguments of the target ascend. CANN_IMAGE may be any reference, a registry's of yours too.
# CANN 9.1.0 is the newest one of Ascend/pytorch's table of versions, there for torch_npu 2.12.0;
# docs/start/ascend.md says what is known of it with torch_npu 2.13.0, of 9.2, and of drivers.
ARG CANN_VERSION=9.1.0
ARG SOC=910b
ARG OS=ubuntu22.04
ARG PYTHON_VERSION=3.11
ARG CANN_IMAGE=ascendai/cann:${CANN_VERSION}-${SOC}-${OS}-py${PYTHON_VERSION}
# Of the target cpu, beside PYTHON_VERSION
ARG PYTHON_IMAGE=python:${PYTHON_VERSION}-slim

# ------------------------------------------------------------------------------ libraries
# Everything but the plugin: a layer for what changes seldom, above it what changes more often. A
# stage sees files only that its steps read; of the plugin, which a stand-in is for, what it needs.
# Package indexes, certificates and passwords come in the secret pip.conf, which no layer keeps.

FROM ${CANN_IMAGE} AS ascend-libraries
ARG PYTHON_VERSION
ARG EXTRAS=npu,ray
WORKDIR /src
COPY scripts/install.sh scripts/
COPY vllm_npu_prep/torchvision_import.py vllm_npu_prep/
COPY constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    scripts/install.sh --venv /opt/npu_prep --python "python$PYTHON_VERSION" \
      --steps environment,torch,vllm,torchvision
COPY setup.py pyproject.toml ./
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    touch README.md && echo '__version__ = "0"' >vllm_npu_prep/__init__.py \
    && scripts/install.sh --venv /opt/npu_prep --python "python$PYTHON_VERSION" \
      --no-editable --extras "$EXTRAS" --steps plugin,trim

FROM ${PYTHON_IMAGE} AS cpu-libraries
ARG PYTHON_VERSION
ARG EXTRAS=
WORKDIR /src
COPY scripts/install.sh scripts/
COPY vllm_npu_prep/torchvision_import.py vllm_npu_prep/
COPY constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    scripts/install.sh --venv /opt/npu_prep --python "python$PYTHON_VERSION" \
      --steps environment,torch,vllm,torchvision
COPY setup.py pyproject.toml ./
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    touch README.md && echo '__version__ = "0"' >vllm_npu_prep/__init__.py \
    && scripts/install.sh --venv /opt/npu_prep --python "python$PYTHON_VERSION" \
      --no-editable --extras "$EXTRAS" --steps plugin,trim

# --------------------------------------------------------------------------------- images
# The plugin is installed here, on top of the libraries: a change of it is a small layer.

FROM ${CANN_IMAGE} AS ascend
ARG SOC
ARG PYTHON_VERSION
# Owner and group of /dev/davinci* on the host: `stat -c '%u %g' /dev/davinci0`
ARG NPU_UID=1000
ARG NPU_GID=1000
RUN --mount=type=bind,source=scripts/image.sh,target=/mnt/image.sh \
    /mnt/image.sh soc "$SOC" && /mnt/image.sh remove-build-tools \
    && /mnt/image.sh user HwHiAiUser "$NPU_UID" "$NPU_GID"
COPY --from=ascend-libraries /opt/npu_prep /opt/npu_prep
# Compiled code that prepares steps serves hosts with other models of processors, too
ENV PATH=/opt/npu_prep/bin:$PATH \
    NUMBA_CPU_NAME=generic \
    NUMBA_CACHE_DIR=/opt/npu_prep/cache/numba \
    VLLM_CACHE_ROOT=/opt/npu_prep/cache/vllm
RUN --mount=type=bind,target=/mnt,rw \
    PIP_NO_INDEX=1 PIP_NO_DEPS=1 /mnt/scripts/install.sh --venv /opt/npu_prep \
      --python "python$PYTHON_VERSION" --no-editable --extras "" --steps plugin,caches \
    && /mnt/scripts/image.sh give HwHiAiUser /opt/npu_prep/cache
COPY scripts/entrypoint.sh scripts/healthcheck.py /opt/npu_prep/bin/
USER ${NPU_UID}:${NPU_GID}
WORKDIR /home/HwHiAiUser
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=20m --retries=3 \
    CMD ["/opt/npu_prep/bin/python", "-I", "/opt/npu_prep/bin/healthcheck.py"]
ENTRYPOINT ["/opt/npu_prep/bin/entrypoint.sh", "vllm", "serve"]
CMD ["--help"]

FROM ${PYTHON_IMAGE} AS cpu
ARG PYTHON_VERSION
RUN --mount=type=bind,source=scripts/image.sh,target=/mnt/image.sh \
    /mnt/image.sh user vllm 1000 1000
COPY --from=cpu-libraries /opt/npu_prep /opt/npu_prep
ENV PATH=/opt/npu_prep/bin:$PATH \
    NPU_PREP_DEVICE=cpu \
    NUMBA_CACHE_DIR=/opt/npu_prep/cache/numba \
    VLLM_CACHE_ROOT=/opt/npu_prep/cache/vllm
RUN --mount=type=bind,target=/mnt,rw \
    PIP_NO_INDEX=1 PIP_NO_DEPS=1 /mnt/scripts/install.sh --venv /opt/npu_prep \
      --python "python$PYTHON_VERSION" --no-editable --extras "" --steps plugin,caches \
    && /mnt/scripts/image.sh give vllm /opt/npu_prep/cache
COPY scripts/entrypoint.sh scripts/healthcheck.py /opt/npu_prep/bin/
USER 1000:1000
WORKDIR /home/vllm
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=20m --retries=3 \
    CMD ["/opt/npu_prep/bin/python", "-I", "/opt/npu_prep/bin/healthcheck.py"]
ENTRYPOINT ["/opt/npu_prep/bin/entrypoint.sh", "vllm", "serve"]
CMD ["--help"]
