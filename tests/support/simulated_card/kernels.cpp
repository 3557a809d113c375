// What computes on the simulated cards: the kernels of the CPU, under CUDA's rules of placement.
//
// A kernel gets tensors of the host that share the memory of those on the card; what it returns is
// taken over as memory of the card. So numbers are those of a run on the CPU.
#include "card.h"
#include "tape.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <unordered_set>

namespace card {
namespace {

using at::Tensor;
using torch::jit::Stack;

std::string kind_name() { return c10::DeviceTypeName(kCard, /*lower_case=*/true); }

// --- Tensors of the host that share a card's memory ----------------------------------------------

void release(void* storage) { delete static_cast<c10::Storage*>(storage); }

class Aliases {
 public:
  // The tensor itself if it is on the host.
  Tensor of(const Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != kCard) {
      return tensor;
    }
    for (const auto& [known, alias] : tensors_) {
      if (known.is_same(tensor)) {
        return alias;
      }
    }
    Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
        storage_of(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = alias.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
    impl->set_storage_offset(tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      impl->set_wrapped_number(true);
    }
    tensors_.emplace_back(tensor, alias);
    return alias;
  }

  // What a kernel returned, on the card.
  Tensor back(const Tensor& result, c10::DeviceIndex device) {
    if (!result.defined() || !result.device().is_cpu()) {
      return result;
    }
    for (const auto& [original, alias] : tensors_) {
      if (alias.is_same(result)) {
        return original;
      }
    }
    for (const auto& [original, alias] : storages_) {
      if (alias.unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl()) {
        return like(result, original);
      }
    }
    c10::Storage storage = adopt(result.storage(), device);
    storages_.emplace_back(storage, result.storage());
    return like(result, storage);
  }

  // A kernel has given a result another size: so gets what it stands for.
  void resize_originals() {
    for (auto& [original, alias] : tensors_) {
      if (original.sizes() != alias.sizes()) {
        original.resize_(alias.sizes());
        Aliases now;
        now.of(original).copy_(alias);
      }
    }
  }

 private:
  c10::Storage storage_of(const c10::Storage& storage) {
    for (const auto& [original, alias] : storages_) {
      if (original.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) {
        return alias;
      }
    }
    c10::DataPtr data(
        to_host_address(storage.data()), new c10::Storage(storage), &release, c10::Device(c10::kCPU));
    c10::Storage alias = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data),
        c10::GetCPUAllocator(), true);
    storages_.emplace_back(storage, alias);
    return alias;
  }

  static Tensor like(const Tensor& result, const c10::Storage& storage) {
    Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(kCardKey), result.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides());
    made.unsafeGetTensorImpl()->set_storage_offset(result.storage_offset());
    return made;
  }

  std::vector<std::pair<Tensor, Tensor>> tensors_;          // on the card, on the host
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;
};

// --- CUDA's rules of placement -------------------------------------------------------------------

// Operators that read an index tensor of the host, copying it to the card.
const std::unordered_set<std::string> kTakeHostIndexes = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
    "aten::_unsafe_index", "aten::_unsafe_index_put"};

class Placement {
 public:
  explicit Placement(const c10::OperatorHandle& op) : op_(op) {}

  void see(const Tensor& tensor, bool written) {
    if (!tensor.defined()) {
      return;
    }
    if (tensor.device().type() != kCard) {
      host_is_written_ |= written && tensor.device().is_cpu();
      if (tensor.device().is_cpu() && (tensor.dim() > 0 || written)) {
        on_host_ = true;
      }
    } else if (device_ < 0) {
      device_ = tensor.device().index();
    } else if (device_ != tensor.device().index()) {
      refuse(kind_name() + ":" + std::to_string(tensor.device().index()));
    }
  }

  // The card of the tensors, -1 if there are none.
  c10::DeviceIndex device() const {
    if (device_ >= 0 && on_host_ &&
        (host_is_written_ || !kTakeHostIndexes.count(op_.operator_name().name))) {
      refuse("cpu");
    }
    return device_;
  }

 private:
  [[noreturn]] void refuse(const std::string& other) const {
    TORCH_CHECK(
        false, "Expected all tensors to be on the same device, but found at least two devices, ",
        kind_name(), ":", static_cast<int>(device_), " and ", other, "! (in ", op_.operator_name(), ")");
    abort();
  }

  const c10::OperatorHandle& op_;
  c10::DeviceIndex device_ = -1;
  bool on_host_ = false, host_is_written_ = false;
};

template <typename Function>
void each_tensor(const c10::IValue& value, const Function& function) {
  if (value.isTensor()) {
    function(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) {
      function(tensor);
    }
  } else if (value.isList()) {  // of optional tensors, or of lists of tensors
    for (const c10::IValue& element : value.toListRef()) {
      each_tensor(element, function);
    }
  }
}

template <typename Function>
c10::IValue with_tensors(const c10::IValue& value, const Function& function) {
  if (value.isTensor()) {
    return function(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& tensor : value.toTensorVector()) {
      changed.push_back(function(tensor));
    }
    return changed;
  }
  if (value.isList()) {
    auto list = value.toList();
    c10::impl::GenericList changed(list.elementType());
    for (const c10::IValue& element : value.toListRef()) {
      changed.push_back(with_tensors(element, function));
    }
    return changed;
  }
  return value;
}

const std::unordered_set<std::string> kShapeDependsOnValues = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::repeat_interleave", "aten::equal", "aten::bincount"};

// Whether places are given as a mask, of which CUDA counts the true values. A single value is
// written without.
bool looks_for_true(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t first) {
  bool found = false;
  if (kTakeHostIndexes.count(op.operator_name().name)) {
    each_tensor(stack[first + 1], [&](const Tensor& index) {
      found |= index.defined() && index.scalar_type() == at::kBool;
    });
    if (op.schema().arguments().size() > 2) {
      found = found && stack[first + 2].toTensor().numel() != 1;
    }
  }
  return found;
}

// --- Every operator that has a kernel for the CPU ------------------------------------------------

// Draws from the card's generator what a kernel without an argument for it would take from the
// host's.
class OwnNumbers {
 public:
  OwnNumbers(const c10::OperatorHandle& op, c10::DeviceIndex device) {
    if (op.hasTag(at::Tag::nondeterministic_seeded)) {
      host_ = at::detail::getDefaultCPUGenerator();
      card_ = host_generator(default_generator(device));
      kept_ = host_.get_state();
      host_.set_state(card_.get_state());
    }
  }
  ~OwnNumbers() {
    if (host_.defined()) {
      card_.set_state(host_.get_state());
      host_.set_state(kept_);
    }
  }

 private:
  at::Generator host_, card_;
  Tensor kept_;
};

c10::DeviceIndex asked_device(const c10::IValue& value) {
  const c10::Device device = value.toDevice();
  TORCH_CHECK(device.index() < device_count(), "CUDA error: invalid device ordinal");
  return device.has_index() ? device.index() : current_device();
}

void compute(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  Placement placement(op);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool written = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    each_tensor((*stack)[first + i], [&](const Tensor& t) { placement.see(t, written); });
  }
  c10::DeviceIndex device = placement.device();
  const bool is_collective = op.operator_name().name.rfind("c10d::", 0) == 0;
  fail_if_asked(is_collective);
  if (kShapeDependsOnValues.count(op.operator_name().name) || looks_for_true(op, *stack, first)) {
    report(Kind::kShape, op.operator_name().name.c_str(), 0);
  }
  Aliases aliases;
  Tape* tape = recording();
  Stack recorded;
  std::vector<std::pair<size_t, c10::IValue>> written_values;
  bool has_generator = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    if (tape) {
      const bool written = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
      recorded.push_back(
          with_tensors(value, [&](const Tensor& t) { return tape->input(t, written); }));
      if (written) {
        written_values.emplace_back(i, value);
      }
    }
    if (value.isDevice()) {
      device = device < 0 ? asked_device(value) : device;
      value = c10::Device(c10::kCPU);
    } else if (arguments[i].name() == "pin_memory") {
      value = c10::IValue();
    } else if (arguments[i].name() == "generator") {
      has_generator = true;
      at::Generator given = value.isNone() ? default_generator(std::max<int>(device, 0))
                                           : value.toGenerator();
      TORCH_CHECK(
          given.device().type() == kCard, "Expected a '", kind_name(),
          "' device type for generator but found '", given.device().type(), "'");
      value = host_generator(given);
    } else {
      value = with_tensors(value, [&](const Tensor& t) { return aliases.of(t); });
      continue;
    }
    if (tape) {
      recorded.back() = value;
    }
  }
  device = device < 0 ? current_device() : device;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    std::optional<OwnNumbers> numbers;
    if (!has_generator) {
      numbers.emplace(op, device);
    }
    op.callBoxedForDispatchKey(c10::DispatchKey::CPU, *stack);
    aliases.resize_originals();
  }
  std::vector<Tensor> results;
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    (*stack)[i] =
        with_tensors((*stack)[i], [&](const Tensor& t) { return aliases.back(t, device); });
    if (tape) {
      const std::vector<Tensor> found = Tape::tensors((*stack)[i]);
      results.insert(results.end(), found.begin(), found.end());
    }
  }
  if (tape) {
    for (const auto& [i, value] : written_values) {  // which may have another size now
      recorded[i] = with_tensors(value, [&](const Tensor& t) { return Tape::bare(t); });
    }
    tape->add(op, std::move(recorded), results);
  }
}

// An operator of a tape once more.
void compute_again(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (op.operator_name().name == "aten::copy_") {  // above, too, it is no kernel of the CPU alone
    stack[0].toTensor().copy_(stack[1].toTensor());
    return;
  }
  OwnNumbers numbers(op, current_device());
  op.callBoxedForDispatchKey(c10::DispatchKey::CPU, stack);
}

// --- Between ranks: NCCL in name, gloo in truth --------------------------------------------------

// Gloo takes tensors of the host alone: the group gets a twin in which it is the CPU's backend.
void communicate(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  int64_t bytes = 0;
  for (size_t i = first; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    each_tensor(value, [&](const Tensor& t) { bytes = std::max<int64_t>(bytes, t.nbytes()); });
    if (value.isCustomClass()) {
      auto object = value.toObject();
      if (object->type()->name().value().name() != "ProcessGroup") {
        continue;
      }
      auto group = value.toCustomClass<c10d::ProcessGroup>();
      auto twin = c10::make_intrusive<c10d::ProcessGroup>(group->getRank(), group->getSize());
      twin->setBackend(
          c10::kCPU, c10d::ProcessGroup::BackendType::GLOO, group->getBackend(kCard));
      value = c10::IValue(std::move(twin));
    }
  }
  report(Kind::kCollective, op.operator_name().name.c_str(), bytes);
  compute(op, keys, stack);
}

// --- Operators of which the CPU's kernel would do something else ---------------------------------

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  fail_if_asked(false);
  Aliases aliases;
  Tensor target = aliases.of(self);
  Tensor from = aliases.of(source);
  const auto bytes = static_cast<int64_t>(self.nbytes());
  if (target.const_data_ptr() == from.const_data_ptr() && self.strides() == source.strides()) {
    return self;  // what gloo has worked on, and returns as its result
  }
  if (bytes > 0 && self.device().type() == kCard && source.device().is_cpu()) {
    report(Kind::kToDevice, source.is_pinned() ? "pinned" : "pageable", bytes);
  } else if (bytes > 0 && source.device().type() == kCard && self.device().is_cpu()) {
    const bool is_pinned = self.is_pinned();
    report(
        non_blocking && is_pinned ? Kind::kToHostAsync : Kind::kToHost,
        is_pinned ? "pinned" : "pageable", bytes);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  if (Tape* tape = recording()) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    Stack inputs = {tape->input(self, true), tape->input(source, false), false};
    target.copy_(from, false);
    tape->add(op, std::move(inputs), {self});
    return self;
  }
  target.copy_(from, false);
  return self;
}

at::Scalar local_scalar(const Tensor& self) {
  report(Kind::kItem, "item", static_cast<int64_t>(self.nbytes()));
  Aliases aliases;
  at::AutoDispatchBelowADInplaceOrView below;
  return aliases.of(self).item();
}

void make_room(const Tensor& self) {
  const auto* impl = self.unsafeGetTensorImpl();
  const size_t end = impl->numel() == 0
      ? 0
      : at::detail::computeStorageNbytes(
            impl->sizes(), impl->strides(), impl->itemsize(), impl->storage_offset());
  c10::StorageImpl* storage = self.storage().unsafeGetStorageImpl();
  if (end > storage->nbytes()) {
    set_bytes(storage, end);
  }
}

const Tensor& resize_(
    const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() != size) {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    make_room(self);
  }
  if (format.has_value()) {
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return self;
}

Tensor& set_storage(
    Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
    at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  TORCH_CHECK(
      source.device_type() == kCard, "Attempted to set the storage of a tensor on device ",
      self.device(), " to a storage on different device ", source.device());
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  make_room(self);
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {count}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  return set_whole_storage(self, adopt(at::empty({0}).storage(), self.device().index()));
}

// The products as such, as no kernel of CUDA is here: which one a card takes cannot be seen.
int64_t plain_attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;  // at::SDPBackend::math
}

void record_stream(Tensor&, at::Stream) {}

struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning&) override {}  // "overriding a previously registered kernel"
};

torch::Library* library(const char* name) {
  return new torch::Library(
      torch::Library::IMPL, name, kCardKey, __FILE__, __LINE__);
}

}  // namespace

void set_bytes(c10::StorageImpl* storage, size_t bytes) {
  const size_t kept = std::min(bytes, storage->nbytes());
  c10::DataPtr data = allocate(bytes, storage->device().index());
  if (kept > 0) {
    memcpy(to_host_address(data.get()), to_host_address(storage->data()), kept);
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

}  // namespace card

#ifdef CARD_IS_PRIVATE
// Mixed precision is a backend's own to switch on: what is computed in which format is CUDA's list.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SINGLE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(SINGLE)
}
#endif

// --- For Python, by ctypes -----------------------------------------------------------------------

extern "C" {

// Everything that torch itself computes.
void card_register_kernels() {
  using namespace card;
  const std::unordered_set<std::string> own = {
      "aten::copy_", "aten::_local_scalar_dense", "aten::resize_", "aten::set_",
      "aten::_fused_sdp_choice", "aten::record_stream"};
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  auto& dispatcher = c10::Dispatcher::singleton();
  torch::Library* aten = library("aten");
  for (const c10::OperatorName& name : dispatcher.getAllOpNamesForDispatchKey(c10::DispatchKey::CPU)) {
    auto op = dispatcher.findSchema(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || own.count(name.name)) {
      continue;
    }
    if (name.name.rfind("aten::", 0) == 0) {
      aten->impl(name.name.substr(6).append(name.overload_name.empty() ? "" : ".").append(name.overload_name).c_str(),
                 torch::CppFunction::makeFromBoxedFunction<&compute>());
    }
  }
  aten->impl("copy_", &copy_);
  aten->impl("_local_scalar_dense", &local_scalar);
  aten->impl("resize_", &resize_);
  aten->impl("set_.source_Storage_storage_offset", &set_storage);
  aten->impl("set_.source_Storage", &set_whole_storage);
  aten->impl("set_.source_Tensor", &set_tensor);
  aten->impl("set_", &set_nothing);
  aten->impl("record_stream", &record_stream);
  torch::Library* every = new torch::Library(
      torch::Library::IMPL, "_", kCardKey, __FILE__, __LINE__);
  every->fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
}

// What UntypedStorage.resize_ does on a card: FSDP frees gathered parameters so.
void card_resize_storage(c10::StorageImpl* storage, size_t bytes) {
  card::set_bytes(storage, bytes);
}

// Everything of a namespace that has a kernel for the CPU by now, such as bitsandbytes.
void card_register_namespace(const char* wanted) {
  using namespace card;
  const std::string prefix = std::string(wanted) + "::";
  const bool is_collective = prefix == "c10d::";
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  auto& dispatcher = c10::Dispatcher::singleton();
  torch::Library* found = library(wanted);
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findSchema(name);
    if (name.name.rfind(prefix, 0) != 0 || !op || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
      continue;
    }
    const std::string rest = name.name.substr(prefix.size()) +
        (name.overload_name.empty() ? "" : "." + name.overload_name);
    found->impl(
        rest.c_str(),
        is_collective ? torch::CppFunction::makeFromBoxedFunction<&communicate>()
                      : torch::CppFunction::makeFromBoxedFunction<&compute>());
  }
}

// CUDA graphs: what this thread computes from now on is recorded.
void card_capture_begin() {
  c10::ThreadLocalDebugInfo::_push(
      c10::DebugInfoKind::TEST_INFO, std::make_shared<card::Tape>());
}

int card_is_capturing() { return card::recording() != nullptr; }

// The graph, which card_free_graph frees.
void* card_capture_end() {
  auto recorded = c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::TEST_INFO);
  auto* tape = new std::shared_ptr<card::Tape>(std::static_pointer_cast<card::Tape>(recorded));
  (*tape)->finish();
  return tape;
}

int64_t card_graph_size(void* graph) {
  return (*static_cast<std::shared_ptr<card::Tape>*>(graph))->size();
}

void card_free_graph(void* graph) { delete static_cast<std::shared_ptr<card::Tape>*>(graph); }

// Why it failed; nullptr: it did not.
const char* card_replay(void* graph) {
  static thread_local std::string why;
  try {
    (*static_cast<std::shared_ptr<card::Tape>*>(graph))->replay(&card::compute_again);
    return nullptr;
  } catch (const std::exception& error) {
    why = error.what();
    return why.c_str();
  }
}

}  // extern "C"
