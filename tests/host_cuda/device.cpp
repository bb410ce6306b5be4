// A CUDA device on the host, for a torch without CUDA: its tensors lie in host memory, and every
// operator of them runs the kernel of the CPU on the same memory.
//
// So programs that say "cuda" run with real values, on a machine without a GPU. What differs from a
// GPU: nothing runs behind the host, and streams and events have no effect, besides the time that an
// event notes. What does not: a tensor of the CPU among tensors of the device is an error, and so is
// a generator of the CPU. Memory is counted.
//
// It must be loaded before torch is imported, because torch asks for its hooks once.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/profiler/stubs/base.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {

using namespace c10;

// --- streams, events and the current device

thread_local DeviceIndex current_device = 0;
thread_local StreamId current_stream = 0;
std::atomic<StreamId> num_streams{1};
using Clock = std::chrono::steady_clock;

DeviceIndex count_devices() {
  const char* number = std::getenv("HOST_CUDA_DEVICES");
  return static_cast<DeviceIndex>(number ? std::atoi(number) : 8);
}

struct HostGuard final : impl::DeviceGuardImplInterface {
  HostGuard() = default;
  explicit HostGuard(DeviceType) {}
  DeviceType type() const override { return kCUDA; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(kCUDA, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < count_devices(), "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  Stream getStream(Device device) const noexcept override { return Stream(Stream::UNSAFE, device, current_stream); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::UNSAFE, device, 0); }
  Stream getNewStream(Device device, int) const override { return Stream(Stream::UNSAFE, device, num_streams++); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const noexcept override {
    auto before = current_stream;
    current_stream = stream.id();
    return Stream(Stream::UNSAFE, stream.device(), before);
  }
  DeviceIndex deviceCount() const noexcept override { return count_devices(); }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override {
    if (*event == nullptr) *event = new Clock::time_point;
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    TORCH_CHECK(first && second, "Both events must be recorded before calculating elapsed time.");
    auto span = *static_cast<Clock::time_point*>(second) - *static_cast<Clock::time_point*>(first);
    return std::chrono::duration<double, std::milli>(span).count();
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, HostGuard)

// --- memory

std::atomic<int64_t> allocated{0}, peak{0};

void count(int64_t num_bytes) {
  int64_t now = allocated += num_bytes, before = peak;
  while (now > before && !peak.compare_exchange_weak(before, now)) {
  }
}

// Memory of the host that a storage of the device holds, and a counted number of bytes.
struct Held {
  DataPtr memory;
  Storage storage;
  int64_t num_bytes;
};

DataPtr held(Held* held, void* data, Device device) {
  count(held->num_bytes);
  auto release = [](void* context) {
    auto* held = static_cast<Held*>(context);
    count(-held->num_bytes);
    delete held;
  };
  return DataPtr(data, held, release, device);
}

struct DeviceAllocator final : Allocator {
  DataPtr allocate(size_t size) override {
    auto memory = GetCPUAllocator()->allocate(size);
    void* data = memory.get();
    return held(new Held{std::move(memory), {}, static_cast<int64_t>(size)}, data, Device(kCUDA, current_device));
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
} device_allocator;
REGISTER_ALLOCATOR(kCUDA, &device_allocator)

// Page-locked memory is memory of the host whose addresses are known here.
std::mutex pinned_mutex;
std::map<char*, size_t> pinned;

struct PinnedAllocator final : Allocator {
  DataPtr allocate(size_t size) override {
    auto* memory = new DataPtr(GetCPUAllocator()->allocate(size));
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[static_cast<char*>(memory->get())] = size;
    auto release = [](void* context) {
      auto* memory = static_cast<DataPtr*>(context);
      {
        std::lock_guard<std::mutex> lock(pinned_mutex);
        pinned.erase(static_cast<char*>(memory->get()));
      }
      delete memory;
    };
    return DataPtr(memory->get(), memory, release, Device(kCPU));
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
} pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto* address = static_cast<char*>(const_cast<void*>(data));
  auto next = pinned.upper_bound(address);
  if (next == pinned.begin()) return false;
  auto [begin, size] = *std::prev(next);
  return address < begin + size;
}

// --- generators

std::mutex generators_mutex;
std::set<GeneratorImpl*> generators;

at::Generator new_generator() {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(default_rng_seed_val);
  std::lock_guard<std::mutex> lock(generators_mutex);
  generators.insert(generator.unsafeGetGeneratorImpl());
  return generator;
}

const at::Generator& default_generator() {
  static at::Generator generator = new_generator();
  return generator;
}

bool is_of_device(const at::Generator& generator) {
  std::lock_guard<std::mutex> lock(generators_mutex);
  return generators.count(generator.unsafeGetGeneratorImpl()) > 0;
}

// --- operators

// The arguments of one call, in memory of the host, and what they stand for.
struct Call {
  explicit Call(const OperatorHandle& op)
      : name(op.schema().name()), copies(name == "aten::copy_" || name == "aten::_copy_from") {}

  IValue to_host(const IValue& value, bool may_be_on_cpu) {
    if (value.isTensor()) return to_host(value.toTensor(), may_be_on_cpu);
    if (value.isStorage()) return to_host(value.toStorage());
    if (value.isDevice() && value.toDevice().is_cuda()) {
      auto found = value.toDevice();
      device = found.has_index() ? found : Device(kCUDA, current_device);
      return Device(kCPU);
    }
    if (value.isGenerator()) {
      TORCH_CHECK(is_of_device(value.toGenerator()), "Expected a 'cuda' device type for generator but found 'cpu'");
      return value;
    }
    if (!value.isList()) return value;
    auto list = value.toList();
    impl::GenericList converted(list.elementType());
    for (const auto& item : value.toListRef()) converted.push_back(to_host(item, may_be_on_cpu));
    return converted;
  }

  IValue to_device(const IValue& value) {
    if (value.isTensor()) return to_device(value.toTensor());
    if (!value.isList()) return value;
    auto list = value.toList();
    impl::GenericList converted(list.elementType());
    for (const auto& item : value.toListRef()) converted.push_back(to_device(item));
    return converted;
  }

  // Give the tensors of the device the sizes and the memory that the operator has given to them.
  void write_back() {
    for (auto& [host, original] : storages) {
      if (host->data() != original.data()) {
        auto num_bytes = static_cast<int64_t>(host->nbytes());
        auto memory = host->set_data_ptr(DataPtr());
        void* data = memory.get();
        auto* impl = original.unsafeGetStorageImpl();
        impl->set_data_ptr_noswap(held(new Held{std::move(memory), {}, num_bytes}, data, original.device()));
        impl->set_nbytes(num_bytes);
      }
    }
    for (auto& [host, original] : tensors) {
      auto* impl = original.unsafeGetTensorImpl();
      auto found = storages.find(host.storage().unsafeGetStorageImpl());
      if (found != storages.end() && !found->second.is_alias_of(original.storage()))
        impl->set_storage_keep_dtype(found->second);
      if (host.sizes() != original.sizes() || host.strides() != original.strides() ||
          host.storage_offset() != original.storage_offset())
        impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

  std::string name;
  bool copies;
  Device device = Device(kCUDA, current_device);

 private:
  Storage to_host(const Storage& storage) {
    for (auto& [host, original] : storages)
      if (original.is_alias_of(storage)) return Storage(intrusive_ptr<StorageImpl>::reclaim_copy(host));
    auto release = [](void* context) { delete static_cast<Storage*>(context); };
    DataPtr memory(storage.mutable_data(), new Storage(storage), release, Device(kCPU));
    auto host = make_intrusive<StorageImpl>(
        StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(memory), GetCPUAllocator(), /*resizable=*/true);
    storages.emplace(host.get(), storage);
    hosts.push_back(host);
    return Storage(host);
  }

  at::Tensor to_host(const at::Tensor& tensor, bool may_be_on_cpu) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      TORCH_CHECK(
          copies || may_be_on_cpu || tensor.dim() == 0,
          "Expected all tensors to be on the same device, but found at least two devices, cuda and ",
          tensor.device(), " (", name, ")");
      return tensor;
    }
    device = tensor.device();
    auto host = laid_out_as(tensor, to_host(tensor.storage()), DispatchKey::CPU);
    tensors.emplace_back(host, tensor);
    return host;
  }

  at::Tensor to_device(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (auto& [host, original] : tensors)
      if (host.is_same(tensor)) return original;
    auto* impl = tensor.storage().unsafeGetStorageImpl();
    auto found = storages.find(impl);
    if (found == storages.end()) {
      auto num_bytes = static_cast<int64_t>(impl->nbytes());
      auto memory = held(new Held{{}, tensor.storage(), num_bytes}, impl->mutable_data(), device);
      auto storage = make_intrusive<StorageImpl>(
          StorageImpl::use_byte_size_t(), num_bytes, std::move(memory), &device_allocator, /*resizable=*/true);
      hosts.push_back(intrusive_ptr<StorageImpl>::reclaim_copy(impl));
      found = storages.emplace(impl, Storage(storage)).first;
    }
    return laid_out_as(tensor, found->second, DispatchKey::CUDA);
  }

  static at::Tensor laid_out_as(const at::Tensor& tensor, const Storage& storage, DispatchKey key) {
    auto made = at::detail::make_tensor<TensorImpl>(Storage(storage), DispatchKeySet(key), tensor.dtype());
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.is_conj()) impl->_set_conj(true);
    if (tensor.is_neg()) impl->_set_neg(true);
    return made;
  }

  std::vector<intrusive_ptr<StorageImpl>> hosts;
  std::unordered_map<StorageImpl*, Storage> storages;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors;
};

void run_on_host(const OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call call(op);
  auto begin = stack->end() - static_cast<int64_t>(schema.arguments().size());
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    auto& value = *(begin + static_cast<int64_t>(i));
    // A GPU takes indices of the CPU, and moves them.
    value = call.to_host(value, argument.name() == "indices");
    if (value.isNone() && *argument.type() == *OptionalType::create(GeneratorType::get())) value = default_generator();
  }
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  call.write_back();
  for (auto value = stack->end() - static_cast<int64_t>(schema.returns().size()); value != stack->end(); ++value)
    *value = call.to_device(*value);
}

void ignore(const OperatorHandle& op, torch::jit::Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
}

int64_t choose_math(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

// Python's resize_ of a storage of CUDA is left out of a torch without CUDA.
void resize_storage(const at::Tensor& tensor, int64_t num_bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto memory = device_allocator.allocate(num_bytes);
  std::memcpy(memory.get(), storage->data(), std::min<size_t>(num_bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(num_bytes);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  // It has a kernel for all devices, which asks for one of CUDA inside.
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  m.impl("record_stream", torch::CppFunction::makeFromBoxedFunction<&ignore>());
}

TORCH_LIBRARY(host_cuda, m) {
  m.def("default_generator() -> Generator?", [] { return default_generator(); });
  m.def("allocated_bytes() -> int", [] { return allocated.load(); });
  m.def("peak_bytes() -> int", [] { return peak.load(); });
  m.def("reset_peak() -> ()", [] { peak = allocated.load(); });
  m.def("resize_storage(Tensor tensor, int num_bytes) -> ()", &resize_storage);
}

// Without them, the profiler would throw and catch an error at every operator.
struct HostProfiler final : torch::profiler::impl::ProfilerStubs {
  using Event = torch::profiler::impl::ProfilerVoidEventStub;
  void record(DeviceIndex* device, Event* event, int64_t* cpu_ns) const override {
    if (device) *device = current_device;
    *event = std::make_shared<Clock::time_point>(Clock::now());
    if (cpu_ns) *cpu_ns = Clock::now().time_since_epoch().count();
  }
  float elapsed(const Event* first, const Event* second) const override {
    auto span = *static_cast<Clock::time_point*>(second->get()) - *static_cast<Clock::time_point*>(first->get());
    return std::chrono::duration<float, std::micro>(span).count();
  }
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> action) const override {
    for (int device = 0; device < count_devices(); ++device) action(device);
  }
  void synchronize() const override {}
} host_profiler;

struct Quiet final : WarningHandler {
  void process(const Warning&) override {}
};

// Collectives of the device are those of the host, on the same memory.
bool redirect_collectives() {
  Quiet quiet;
  WarningUtils::WarningHandlerGuard guard(&quiet);
  static torch::Library library(torch::Library::IMPL, "c10d", DispatchKey::CUDA, __FILE__, __LINE__);
  for (const char* name :
       {"send", "recv_", "recv_any_source_", "reduce_", "broadcast_", "allreduce_", "allreduce_coalesced_",
        "allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
        "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "gather_", "scatter_",
        "alltoall_", "alltoall_base_", "barrier"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  torch::profiler::impl::registerCUDAMethods(&host_profiler);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_math);
  return true;
}
[[maybe_unused]] const bool is_redirected = redirect_collectives();

}  // namespace

namespace at {

struct HostHooks final : CUDAHooksInterface {
  explicit HostHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { ::current_device = device; }
  DeviceIndex deviceCount() const override { return count_devices(); }
  int getNumGPUs() const override { return count_devices(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void deviceSynchronize(DeviceIndex) const override {}
  const Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
  Generator getNewGenerator(DeviceIndex) const override { return new_generator(); }
};
// The name is the one that torch asks for.
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, HostHooks)

}  // namespace at
