// Cards in name only, for a CPU build of torch: devices, memory, random numbers and hooks.
//
// Tensors "on" a card are ordinary tensors of the device type CUDA; their memory is that of the
// host under another address. What computes with them is in kernels.cpp.
#include "card.h"
#include "tape.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <string>

namespace card {
namespace {

constexpr int kMost = 16;        // cards that a machine may have
constexpr size_t kBlock = 512;   // torch's allocator rounds every size up to a multiple of it
constexpr int64_t kSegment = 2 << 20;  // and takes memory from the driver in multiples of this

using Callback = void (*)(int kind, const char* what, int64_t bytes);
std::atomic<Callback> callback{nullptr};
std::atomic<int> cards{0};
thread_local c10::DeviceIndex current = 0;

struct Memory {
  int64_t capacity = INT64_MAX;
  int64_t allocated = 0, most = 0;            // in blocks of 512 bytes
  int64_t requested = 0, most_requested = 0;  // as asked for
  int64_t allocations = 0;
};
std::array<Memory, kMost> memories;
std::mutex memory_mutex;

// --- Failures that a test has asked for ----------------------------------------------------------

std::mutex failure_mutex;
std::string asked_failure;  // torch, driver, cublas, nccl; empty: none

std::string gib(int64_t bytes) {
  char text[32];
  if (bytes < (int64_t{1} << 30)) {
    snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(bytes) / (1 << 20));
  } else {
    snprintf(text, sizeof text, "%.2f GiB", static_cast<double>(bytes) / (1 << 30));
  }
  return text;
}

[[noreturn]] void out_of_memory(c10::DeviceIndex device, int64_t asked, const Memory& memory) {
  // The words of c10/cuda/CUDACachingAllocator.cpp.
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", gib(asked), ". GPU ",
      static_cast<int>(device), " has a total capacity of ", gib(memory.capacity), " of which ",
      gib(memory.capacity - memory.allocated), " is free. Of the allocated memory ",
      gib(memory.allocated), " is allocated by PyTorch, and 0.00 MiB is reserved by PyTorch but "
      "unallocated. If reserved but unallocated memory is large try setting "
      "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.");
  abort();
}

void take(c10::DeviceIndex device, int64_t bytes) {
  const int64_t rounded = (bytes + kBlock - 1) / kBlock * kBlock;
  std::lock_guard<std::mutex> lock(memory_mutex);
  Memory& memory = memories[device];
  if (memory.allocated + rounded > memory.capacity) {
    out_of_memory(device, bytes, memory);
  }
  memory.allocations += 1;
  memory.allocated += rounded;
  memory.requested += bytes;
  memory.most = std::max(memory.most, memory.allocated);
  memory.most_requested = std::max(memory.most_requested, memory.requested);
}

void give_back(c10::DeviceIndex device, int64_t bytes) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  memories[device].allocated -= (bytes + kBlock - 1) / kBlock * kBlock;
  memories[device].requested -= bytes;
}

void forget_peak(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  Memory& memory = memories.at(device);
  memory.most = memory.allocated;
  memory.most_requested = memory.requested;
}

// --- Memory --------------------------------------------------------------------------------------

struct Block {
  c10::DataPtr host;    // either of these two
  c10::Storage adopted;
  c10::DeviceIndex device;
  int64_t bytes;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  give_back(block->device, block->bytes);
  delete block;
}

c10::CachingAllocator::Stat counted(int64_t now, int64_t most) {
  c10::CachingAllocator::Stat stat;
  stat.current = now;
  stat.peak = most;
  return stat;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return card::allocate(bytes, current); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    memcpy(to_host_address(target), to_host_address(source), bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory_mutex);
    const Memory& memory = memories.at(device);
    const int64_t reserved = (memory.most + kSegment - 1) / kSegment * kSegment;
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocation[0].allocated = memory.allocations;
    stats.allocated_bytes[0] = counted(memory.allocated, memory.most);
    stats.active_bytes[0] = counted(memory.allocated, memory.most);
    stats.requested_bytes[0] = counted(memory.requested, memory.most_requested);
    stats.reserved_bytes[0] = counted(reserved, reserved);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { forget_peak(device); }
};
Allocator the_allocator;

// Page-locked memory of the host: torch rounds it up to a power of two, and so does this count.
std::mutex pinned_mutex;
std::map<uintptr_t, size_t> pinned;  // address -> bytes
int64_t pinned_bytes = 0, pinned_most = 0;

void free_pinned(void* pointer) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto found = pinned.find(reinterpret_cast<uintptr_t>(pointer));
  pinned_bytes -= static_cast<int64_t>(found->second);
  pinned.erase(found);
  std::free(pointer);
}

bool is_pinned(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned.upper_bound(address);
  if (after == pinned.begin()) {
    return false;
  }
  --after;
  return address < after->first + after->second;
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    size_t rounded = 1;
    while (rounded < bytes) {
      rounded *= 2;
    }
    void* pointer = nullptr;
    TORCH_CHECK(posix_memalign(&pointer, 64, std::max<size_t>(rounded, 64)) == 0, "no memory");
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[reinterpret_cast<uintptr_t>(pointer)] = rounded;
    pinned_bytes += static_cast<int64_t>(rounded);
    pinned_most = std::max(pinned_most, pinned_bytes);
    return {pointer, pointer, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    memcpy(target, source, bytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedAllocator the_pinned_allocator;

// --- Random numbers ------------------------------------------------------------------------------

struct CardGenerator final : at::CPUGeneratorImpl {
  explicit CardGenerator(c10::DeviceIndex device)
      : host(at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val)) {
    device_ = c10::Device(kCard, device);
    key_set_ = c10::DispatchKeySet(kCardKey);
  }
  void set_current_seed(uint64_t seed) override {
    require_no_recording();
    host.set_current_seed(seed);
  }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    require_no_recording();
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    require_no_recording();
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  // A graph knows how far a generator is only when it is replayed.
  static void require_no_recording() {
    TORCH_CHECK(
        recording() == nullptr,
        "CUDA error: operation not permitted when stream is capturing (a state of a generator)");
  }
  at::Generator host;
};

std::array<at::Generator, kMost> default_generators;
bool hands_out_defaults = false;  // Python has no other way to them

// --- What torch asks of a device -----------------------------------------------------------------

using Moment = std::chrono::steady_clock::time_point;  // what an event is

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kCard;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {static_type, current}; }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) {
      TORCH_CHECK(device.index() < cards, "CUDA error: invalid device ordinal");
      current = device.index();
    }
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) {
      current = device.index();
    }
  }
  c10::Stream getStream(c10::Device device) const override { return stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream(device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(device); }
  c10::Stream exchangeStream(c10::Stream before) const override { return stream(before.device()); }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(cards.load());
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag flag)
      const override {
    TORCH_CHECK(
        recording() == nullptr || flag == c10::EventFlag::PYTORCH_DEFAULT,
        "CUDA error: operation not permitted when stream is capturing (an event with a time)");
    if (*event == nullptr) {
      *event = new Moment;
    }
    *static_cast<Moment*>(*event) = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Moment*>(event);
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {
    report(Kind::kSynchronize, "stream", 0);
  }
  void synchronizeEvent(void*) const override { report(Kind::kSynchronize, "event", 0); }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    report(Kind::kSynchronize, "device", 0);
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(
               *static_cast<Moment*>(end) - *static_cast<Moment*>(begin))
        .count();
  }

 private:
  static c10::Stream stream(c10::Device device) {
    return c10::Stream(
        c10::Stream::DEFAULT, device.has_index() ? device : c10::Device(static_type, current));
  }
};
// What torch asks of every kind of device.
template <typename Interface>
struct Hooks : Interface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return cards > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current : std::exchange(current, device);
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &the_pinned_allocator; }
  c10::Device getDeviceFromPtr(void*) const override { return {kCard, current}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    if (hands_out_defaults) {
      return default_generator(device);
    }
    return at::make_generator<CardGenerator>(device < 0 ? current : device);
  }
};

#ifdef CARD_IS_PRIVATE
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct PrivateHooks final : Hooks<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    set_bytes(storage.unsafeGetStorageImpl(), bytes);
  }
};
const bool is_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new PrivateHooks);
  return true;
}();
#else
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct CUDAHooks final : Hooks<at::CUDAHooksInterface> {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return cards > 0; }
  int getNumGPUs() const override { return device_count(); }
  c10::DeviceIndex current_device() const override { return current; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &the_allocator; }
  void deviceSynchronize(c10::DeviceIndex) const override {
    report(Kind::kSynchronize, "device", 0);
  }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, CUDAHooks)
#endif

// The gradient buckets of DistributedDataParallel time themselves with one of these.
struct BucketTimer final : c10d::Timer {
  explicit BucketTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return 1; }
};
using c10d::RegistererTimerRegistry;
using c10d::TimerRegistry;
C10_REGISTER_TYPED_CLASS(TimerRegistry, kCard, BucketTimer)

}  // namespace

void report(Kind kind, const char* what, int64_t bytes) {
  TORCH_CHECK(
      recording() == nullptr,
      "CUDA error: operation not permitted when stream is capturing (", what, ")");
  if (Callback found = callback.load()) {
    found(static_cast<int>(kind), what, bytes);
  }
}

void* to_device_address(void* host) {
  return host ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(host) | kDeviceBit) : nullptr;
}

void* to_host_address(const void* device) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(device) & ~kDeviceBit);
}

c10::DeviceIndex current_device() { return current; }
c10::DeviceIndex device_count() { return static_cast<c10::DeviceIndex>(cards.load()); }
c10::Allocator* allocator() { return &the_allocator; }

c10::DataPtr allocate(size_t bytes, c10::DeviceIndex device) {
  fail_if_asked(false);
  take(device, static_cast<int64_t>(bytes));
  auto* block = new Block{
      c10::GetDefaultCPUAllocator()->allocate(bytes), {}, device, static_cast<int64_t>(bytes)};
  return {to_device_address(block->host.get()), block, &free_block, c10::Device(kCard, device)};
}

c10::Storage adopt(const c10::Storage& host, c10::DeviceIndex device) {
  const auto bytes = static_cast<int64_t>(host.nbytes());
  take(device, bytes);
  auto* block = new Block{{}, host, device, bytes};
  c10::DataPtr data(
      to_device_address(host.mutable_data()), block, &free_block, c10::Device(kCard, device));
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, std::move(data), &the_allocator, true);
}

at::Generator host_generator(const at::Generator& of_card) {
  return static_cast<CardGenerator*>(of_card.unsafeGetGeneratorImpl())->host;
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static std::once_flag made;
  std::call_once(made, [] {
    for (int i = 0; i < kMost; ++i) {
      default_generators[i] = at::make_generator<CardGenerator>(static_cast<c10::DeviceIndex>(i));
    }
  });
  return default_generators.at(device);
}

void fail_if_asked(bool in_collective) {
  std::string wording;
  {
    std::lock_guard<std::mutex> lock(failure_mutex);
    if (asked_failure.empty() || (asked_failure == "nccl" && !in_collective)) {
      return;
    }
    wording.swap(asked_failure);
  }
  if (wording == "torch") {
    Memory memory = memories[current];
    memory.allocated = memory.capacity - (int64_t{1} << 20);
    out_of_memory(current, int64_t{1} << 31, memory);
  }
  if (wording == "driver") {
    throw c10::AcceleratorError(
        {__func__, __FILE__, __LINE__}, 2,
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in "
        "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more "
        "information.\n");
  }
  if (wording == "nccl") {
    TORCH_CHECK_WITH(
        DistBackendError, false, "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error "
        "(run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: "
        "Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'");
  }
  TORCH_CHECK(
      false, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`");
}

}  // namespace card

// --- For Python, by ctypes -----------------------------------------------------------------------

extern "C" {

void card_set_count(int count) {
  card::cards = count;
  c10::SetAllocator(card::kCard, card::allocator());
  at::setHostAllocator(card::kCard, &card::the_pinned_allocator);
}

void card_hand_out_defaults(int on) { card::hands_out_defaults = on != 0; }
void card_set_callback(card::Callback callback) { card::callback = callback; }
void card_set_device(int device) { card::current = static_cast<c10::DeviceIndex>(device); }
int card_current_device() { return card::current; }
void card_set_capacity(int device, int64_t bytes) { card::memories.at(device).capacity = bytes; }

void card_fail(const char* wording) {
  std::lock_guard<std::mutex> lock(card::failure_mutex);
  card::asked_failure = wording;
}

// allocated, most allocated, requested, most requested, allocations
void card_memory(int device, int64_t* values) {
  std::lock_guard<std::mutex> lock(card::memory_mutex);
  const card::Memory& memory = card::memories.at(device);
  values[0] = memory.allocated;
  values[1] = memory.most;
  values[2] = memory.requested;
  values[3] = memory.most_requested;
  values[4] = memory.allocations;
}

void card_forget_peak(int device) { card::forget_peak(static_cast<c10::DeviceIndex>(device)); }

// Memory of the host that is page-locked from now on: cudaErrorHostMemoryAlreadyRegistered (712) if
// a part of it is.
int card_host_register(uintptr_t address, size_t bytes) {
  std::lock_guard<std::mutex> lock(card::pinned_mutex);
  auto after = card::pinned.lower_bound(address + bytes);
  if (after != card::pinned.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second > address) {
      return 712;
    }
  }
  card::pinned[address] = bytes;
  card::pinned_bytes += static_cast<int64_t>(bytes);
  card::pinned_most = std::max(card::pinned_most, card::pinned_bytes);
  return 0;
}

// It is not any more: cudaErrorHostMemoryNotRegistered (713) if it was not.
int card_host_unregister(uintptr_t address) {
  std::lock_guard<std::mutex> lock(card::pinned_mutex);
  auto found = card::pinned.find(address);
  if (found == card::pinned.end()) {
    return 713;
  }
  card::pinned_bytes -= static_cast<int64_t>(found->second);
  card::pinned.erase(found);
  return 0;
}

int64_t card_pinned_bytes(int most) {
  std::lock_guard<std::mutex> lock(card::pinned_mutex);
  return most ? card::pinned_most : card::pinned_bytes;
}

}  // extern "C"
