# docker build -t dovetail .                          # CUDA build of torch; the host needs an NVIDIA driver only
# docker build -t dovetail --build-arg TORCH=cpu .    # CPU build
# docker run --rm --gpus all --ipc host -v "$PWD":/data dovetail train recipe.yaml --layout tp=2,dp=4
FROM python:3.12
ARG TORCH=default
ARG EXTRAS=datasets,math,vision,wandb,tensorboard
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY docs docs
COPY src src
RUN python -m pip install --no-cache-dir ".[$EXTRAS]" \
    $(if [ "$TORCH" = cpu ]; then echo --extra-index-url https://download.pytorch.org/whl/cpu; fi)
RUN dovetail --version && dovetail docs recipe > /dev/null
WORKDIR /data
ENTRYPOINT ["dovetail"]
