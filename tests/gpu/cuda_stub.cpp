// What torch asks a GPU for while a function is traced on tensors without data: a current device, a stream, events.
//
// A torch built without CUDA has none of it and refuses. Here all of it exists and does nothing, so that a step is traced
// with the operations, types and layouts that it has on a GPU. Must be loaded before torch is.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

Device device() {
  return Device(c10::DeviceType::CUDA, 0);
}

Stream stream() {
  return Stream(Stream::DEFAULT, device());
}

struct OneDevice final : public c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;

  c10::DeviceType type() const override { return static_type; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return device(); }
  Device exchangeDevice(Device) const override { return device(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}

  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}

  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, OneDevice)

}  // namespace

namespace at {

struct CUDAHooks : public CUDAHooksInterface {  // torch looks it up by this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
