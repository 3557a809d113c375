// What the two halves of the simulated card share: device.cpp (memory, hooks) and kernels.cpp.
#pragma once
#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/Storage.h>

#include <cstdint>

namespace card {

// The kind of device that cards are: CUDA's, or one that torch has no build for.
#ifdef CARD_IS_PRIVATE
constexpr c10::DeviceType kCard = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKey kCardKey = c10::DispatchKey::PrivateUse1;
#else
constexpr c10::DeviceType kCard = c10::DeviceType::CUDA;
constexpr c10::DispatchKey kCardKey = c10::DispatchKey::CUDA;
#endif

// What Python is told of, so that it can count it and say which line caused it.
enum class Kind : int {
  kItem = 0,         // a number is read: the host waits for the device
  kShape = 1,        // a result's shape depends on values (nonzero): the host waits
  kToHost = 2,       // a copy to the host that it waits for
  kToHostAsync = 3,  // a non-blocking copy to pinned memory
  kToDevice = 4,     // a copy to the device
  kCollective = 5,   // between ranks
  kSynchronize = 6,  // of a stream, an event or the device
};

// Calls the Python callback, if there is one; throws while this thread records a graph.
void report(Kind kind, const char* what, int64_t bytes);

// Addresses on a card carry a bit that no address of a process has: what reads them on the host
// ends with SIGSEGV, as it would with a real card.
constexpr uintptr_t kDeviceBit = uintptr_t{1} << 55;
void* to_device_address(void* host);
void* to_host_address(const void* device);

c10::DeviceIndex current_device();
c10::DeviceIndex device_count();

// Memory of the host that has become memory of a card, counted as torch's allocator counts.
c10::Storage adopt(const c10::Storage& host, c10::DeviceIndex device);
// Fresh memory of a card.
c10::DataPtr allocate(size_t bytes, c10::DeviceIndex device);
c10::Allocator* allocator();

// Other memory for a storage of a card, with what it holds.
void set_bytes(c10::StorageImpl* storage, size_t bytes);

// The generator of the host that stands behind one of a card.
at::Generator host_generator(const at::Generator& of_card);
const at::Generator& default_generator(c10::DeviceIndex device);

// Throws the error that a test has asked for, in its wording, the next time memory is needed.
void fail_if_asked(bool in_collective);

}  // namespace card
