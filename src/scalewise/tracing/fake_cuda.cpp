// A CUDA device for fake tensors, in a CPU build of torch: it exists, and does nothing.
//
// Fake tensors have no data, but autograd asks their device for streams and events, and attention
// asks which fused kernels the device has. A CPU build has no answer and aborts.
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

constexpr c10::DeviceIndex kDevices = 8;
thread_local c10::DeviceIndex current_device = 0;
bool prefers_cudnn = false;
int64_t backend_counts[sdp::num_backends] = {};

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;

  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    Device previous = getDevice();
    uncheckedSetDevice(device);
    return previous;
  }
  Device getDevice() const override { return Device(type(), current_device); }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void**, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

struct FakeHooks final : at::CUDAHooksInterface {
  explicit FakeHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex current_device() const override { return ::current_device; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { ::current_device = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(::current_device, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
};

// Rules of an H100 (sm_90) with torch 2.11 to 2.13, from sdp_utils.cpp; dense inputs only.
bool can_use_cudnn(const sdp::sdp_params& params) {
  return params.query.scalar_type() != at::kFloat && params.query.size(-1) % 8 == 0 &&
      params.query.size(-1) <= 128 && params.key.size(-2) != 1 &&
      params.dropout * 16 == std::floor(params.dropout * 16);
}

bool can_use_flash(const sdp::sdp_params& params) {
  return params.query.scalar_type() != at::kFloat && params.query.size(-1) <= 256 &&
      !params.attn_mask.has_value() &&
      !(params.is_causal && params.query.size(-2) != params.key.size(-2));
}

bool can_use_efficient(const sdp::sdp_params& params) {
  const int64_t alignment = params.query.scalar_type() == at::kFloat ? 4 : 8;
  return params.query.size(-1) % alignment == 0 && params.query.size(1) == params.key.size(1);
}

sdp::SDPBackend choose_backend(const sdp::sdp_params& params) {
  if (prefers_cudnn && can_use_cudnn(params)) return sdp::SDPBackend::cudnn_attention;
  if (can_use_flash(params)) return sdp::SDPBackend::flash_attention;
  if (can_use_efficient(params)) return sdp::SDPBackend::efficient_attention;
  return sdp::SDPBackend::math;
}

int64_t choose_and_count(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& mask, double dropout, bool is_causal,
    std::optional<double>, bool enable_gqa) {
  auto backend = static_cast<int64_t>(
      choose_backend({query, key, value, mask, dropout, is_causal, enable_gqa}));
  ++backend_counts[backend];
  return backend;
}

// Kernels of CUDA: without them, the dispatcher would decompose the operators before the trace.
std::tuple<at::Tensor, at::Tensor> fused_rms_norm(
    const at::Tensor&, at::IntArrayRef, const std::optional<at::Tensor>&, std::optional<double>) {
  TORCH_CHECK(false, "the fake CUDA device computes nothing");
}

at::Tensor silu_backward(const at::Tensor&, const at::Tensor&) {
  TORCH_CHECK(false, "the fake CUDA device computes nothing");
}

FakeGuard guard;

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("_fused_rms_norm", &fused_rms_norm);
  library.impl("silu_backward", &silu_backward);
}

namespace at {
using CUDAHooks = ::FakeHooks;  // torch looks for this name
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

// Must run before Python imports torch, which asks for the hooks once. Returns 1 on success.
extern "C" int scalewise_start_fake_cuda() {
  if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA))
    c10::impl::registerDeviceGuard(c10::DeviceType::CUDA, &guard);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_and_count);
  return at::detail::getCUDAHooks().hasCUDA();
}

// Whether cuDNN's attention comes first, as with cuDNN above 9.15 on sm_90.
extern "C" void scalewise_prefer_cudnn(int value) { prefers_cudnn = value; }

// Number of calls that chose a backend of torch.nn.attention.SDPBackend since the last reset.
extern "C" int64_t scalewise_backend_count(int backend) { return backend_counts[backend]; }

extern "C" void scalewise_reset_backend_counts() {
  std::fill(std::begin(backend_counts), std::end(backend_counts), 0);
}
