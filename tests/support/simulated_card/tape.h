// What stands for a CUDA graph on the simulated card: operators with their memory, run again on it.
//
// While a tape records, operators compute as ever, but afterwards all memory is as it was before:
// a capture executes nothing. Replayed, they read and write the memory of the recording, with its
// shapes and numbers. Memory that was allocated meanwhile is the graph's pool: it is overwritten
// after each replay, so that whoever reads it outside reads numbers that are none.
#pragma once
#include "card.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstring>
#include <unordered_map>
#include <vector>

namespace card {

class Tape final : public c10::DebugInfoBase {
 public:
  using Stack = torch::jit::Stack;

  // An argument of the next operator, as it will be found again in a replay.
  at::Tensor input(const at::Tensor& tensor, bool written) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (tensor.device().type() != kCard) {
      TORCH_CHECK(
          tensor.dim() == 0 && !written,
          "CUDA error: operation not permitted when stream is capturing (memory of the host)");
      return tensor;
    }
    const c10::Storage& storage = tensor.storage();
    auto [found, is_new] = places_.emplace(storage.unsafeGetStorageImpl(), outside_.size());
    if (is_new) {
      outside_.push_back({storage.getWeakStorageImpl(), storage.data(), storage.nbytes(), {}});
    }
    if (written && found->second != kOwn) {
      Outside& memory = outside_[found->second];
      if (memory.before.empty()) {
        const auto* bytes = static_cast<const char*>(to_host_address(memory.address));
        memory.before.assign(bytes, bytes + memory.bytes);
      }
    }
    return bare(tensor);
  }

  // An operator that has computed.
  void add(const c10::OperatorHandle& op, Stack inputs, const std::vector<at::Tensor>& results) {
    std::vector<at::Tensor> fresh;
    bool computes = op.schema().is_mutable();
    for (const at::Tensor& result : results) {
      fresh.emplace_back();
      if (!result.defined() || result.device().type() != kCard) {
        continue;
      }
      if (places_.emplace(result.storage().unsafeGetStorageImpl(), kOwn).second) {
        own_.push_back(result.storage());
      } else if (op.schema().is_mutable() || is_view(result, inputs)) {
        continue;  // memory of an argument
      }
      fresh.back() = bare(result);
      computes = true;
    }
    if (computes) {  // else a view
      entries_.push_back({op, std::move(inputs), std::move(fresh)});
    }
  }

  // Ends the recording, of which nothing has happened.
  void finish() {
    for (Outside& memory : outside_) {
      if (!memory.before.empty()) {
        std::memcpy(to_host_address(memory.address), memory.before.data(), memory.before.size());
        std::vector<char>().swap(memory.before);
      }
    }
    spoil();
  }

  template <typename Around>
  void replay(const Around& around) {
    for (const Outside& memory : outside_) {
      auto storage = memory.storage.lock();
      TORCH_CHECK(
          storage && storage->data() == memory.address && storage->nbytes() >= memory.bytes,
          "a recorded operation reads or writes memory that has been freed");
    }
    for (const Entry& entry : entries_) {
      Stack stack = entry.inputs;
      around(entry.op, stack);
      size_t number = 0;
      const size_t first = stack.size() - entry.op.schema().returns().size();
      for (size_t i = first; i < stack.size(); ++i) {
        for (const at::Tensor& result : tensors(stack[i])) {
          const at::Tensor& recorded = entry.fresh.at(number++);
          if (recorded.defined()) {
            TORCH_CHECK(
                recorded.sizes() == result.sizes(), entry.op.operator_name(),
                ": the shape of a result depends on values");
            at::Tensor target = recorded;
            target.copy_(result);
          }
        }
      }
    }
    spoil();
  }

  // Operators that a replay runs, without views.
  int64_t size() const { return static_cast<int64_t>(entries_.size()); }

  static std::vector<at::Tensor> tensors(const c10::IValue& value) {
    if (value.isTensor()) {
      return {value.toTensor()};
    }
    return value.isTensorList() ? value.toTensorVector() : std::vector<at::Tensor>{};
  }

  // The memory of a tensor on a card for kernels of the host, without owning it.
  static at::Tensor bare(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != kCard) {
      return tensor;
    }
    const c10::Storage& storage = tensor.storage();
    c10::DataPtr data(to_host_address(storage.data()), c10::Device(c10::kCPU));
    c10::Storage alias = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data),
        c10::GetCPUAllocator(), true);
    at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        std::move(alias), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
    made.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
    return made;
  }

 private:
  static constexpr size_t kOwn = SIZE_MAX;

  struct Outside {  // memory that was there before the recording
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    const void* address;
    size_t bytes;
    std::vector<char> before;
  };
  struct Entry {
    c10::OperatorHandle op;
    Stack inputs;
    std::vector<at::Tensor> fresh;  // results that have memory of their own
  };

  static bool is_view(const at::Tensor& result, const Stack& inputs) {
    const void* memory = to_host_address(result.storage().data());
    for (const c10::IValue& value : inputs) {
      for (const at::Tensor& input : tensors(value)) {
        if (input.defined() && input.device().is_cpu() && input.storage().data() == memory) {
          return true;
        }
      }
    }
    return false;
  }

  void spoil() {
    for (const c10::Storage& storage : own_) {
      if (storage.nbytes() > 0) {
        std::memset(to_host_address(storage.data()), 0xFF, storage.nbytes());
      }
    }
  }

  std::unordered_map<const c10::StorageImpl*, size_t> places_;
  std::vector<Outside> outside_;
  std::vector<c10::Storage> own_;
  std::vector<Entry> entries_;
};

// The tape that records what this thread computes, and the backward passes that it starts.
inline Tape* recording() {
  return static_cast<Tape*>(
      c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::TEST_INFO));
}

}  // namespace card
