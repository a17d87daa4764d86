// A launch needs the shapes of the results before the kernel ran: they come from the operator's Meta
// kernel. An operator without one, or whose shapes depend on data, waits for its result, which a
// device does for most of them too; that can't be captured.
#include "launch.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cpu/Utils.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "hidden_copies.h"
#include "random.h"
#include "torch_npu_api.h"

namespace launcher {
namespace {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;

// What runs a kernel on the calling thread, as `emulator_in_launch` returns it.
enum InLaunchOf : int { kNothing, kLaunch, kGraph };
thread_local int in_launch = kNothing;

struct ByName {
  bool operator()(const c10::OperatorName& a, const c10::OperatorName& b) const {
    return std::tie(a.name, a.overload_name) < std::tie(b.name, b.overload_name);
  }
};

std::map<c10::OperatorName, std::vector<std::string>, ByName>& written_arguments() {
  static auto& instance = *new std::map<c10::OperatorName, std::vector<std::string>, ByName>;
  return instance;
}

struct Paged {
  std::vector<std::string> arguments, block_ids;
};

std::map<c10::OperatorName, Paged, ByName>& paged_arguments() {
  static auto& instance = *new std::map<c10::OperatorName, Paged, ByName>;
  return instance;
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

// One call of an operator, while its kernel is being put together.
struct Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  std::vector<IValue> arguments;
  c10::Device device{kNpu, 0};
  void* stream = nullptr;
  bool is_reference = false;

  std::vector<bool> is_written;           // per argument
  std::vector<at::Tensor> written;        // the tensors of those, in order
  Stack results;                          // what the caller gets
  std::vector<at::Tensor> fresh;          // results that the kernel has to fill
  std::vector<size_t> fresh_positions;    // among the flattened results
  std::string why_no_shapes;
};

bool writes(const c10::Argument& argument, const std::vector<std::string>& also) {
  if (argument.alias_info() && argument.alias_info()->isWrite()) return true;
  if (argument.name() == "out") return true;  // torch_npu's schemas don't annotate theirs
  return std::find(also.begin(), also.end(), argument.name()) != also.end();
}

c10::Device device_of(const Call& call) {
  for (const auto& argument : call.arguments) {
    for (const auto& tensor : tensors_in(argument))
      if (is_npu(tensor)) return tensor.device();
    if (argument.isDevice() && argument.toDevice().type() == kNpu && argument.toDevice().has_index())
      return argument.toDevice();
  }
  return c10::impl::VirtualGuardImpl(kNpu).getDevice();
}

void find_written(Call& call) {
  static const std::vector<std::string> none;
  auto it = written_arguments().find(call.op.operator_name());
  const auto& also = it == written_arguments().end() ? none : it->second;
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    call.is_written.push_back(writes(call.schema.arguments()[i], also));
    if (!call.is_written.back()) continue;
    for (const auto& tensor : tensors_in(call.arguments[i])) call.written.push_back(tensor);
  }
}

Call make_call(const c10::OperatorHandle& op, Stack* stack, bool is_reference) {
  Call call{op, op.schema()};
  const size_t count = call.schema.arguments().size();
  call.arguments.assign(stack->end() - count, stack->end());
  call.is_reference = is_reference;
  call.device = device_of(call);
  find_written(call);
  return call;
}

at::Tensor new_result(const at::Tensor& meta, c10::Device device) {
  if (!meta.defined()) return meta;
  return at::empty_strided(meta.sizes(), meta.strides(),
                           at::TensorOptions().dtype(meta.dtype()).device(device));
}

// The argument that a result aliases; none for a fresh result.
std::optional<IValue> aliased_argument(const Call& call, const c10::Argument& result) {
  if (!result.alias_info()) return std::nullopt;
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const auto* info = call.schema.arguments()[i].alias_info();
    if (info && info->beforeSets() == result.alias_info()->beforeSets()) return call.arguments[i];
  }
  return std::nullopt;
}

bool has_plain_out(const Call& call) {
  for (const auto& argument : call.schema.arguments())
    if (argument.name() == "out" && !argument.alias_info()) return true;
  return false;
}

bool needs_shapes(const Call& call) {
  if (call.is_reference && (call.schema.returns().empty() || has_plain_out(call))) return false;
  return !call.schema.returns().empty();
}

std::optional<Stack> meta_results(Call& call) {
  if (!needs_shapes(call)) return Stack{};
  try {
    Stack stack;
    for (const auto& argument : call.arguments)
      stack.push_back(map_tensors(argument, meta_of, c10::kMeta));
    call.op.callBoxed(&stack);
    for (const auto& result : stack)
      for (const auto& tensor : tensors_in(result))
        TORCH_CHECK(!tensor.defined() || tensor.is_meta(), "its Meta kernel made no meta tensor");
    return stack;
  } catch (const std::exception& error) {
    call.why_no_shapes = first_line(error.what());
    return std::nullopt;
  }
}

IValue fresh_result(Call& call, const IValue& meta, size_t* position) {
  if (!meta.isTensor() && !meta.isTensorList()) return meta;
  c10::List<at::Tensor> list;
  for (const auto& tensor : tensors_in(meta)) {
    list.push_back(new_result(tensor, call.device));
    call.fresh.push_back(list.get(list.size() - 1));
    call.fresh_positions.push_back((*position)++);
  }
  return meta.isTensor() ? IValue(list.get(0)) : IValue(list);
}

// An out= argument takes the shape of the result, as everywhere in PyTorch.
void resize_like(const IValue& argument, const IValue& meta) {
  const auto targets = tensors_in(argument), shapes = tensors_in(meta);
  for (size_t i = 0; i < std::min(targets.size(), shapes.size()); ++i)
    if (targets[i].defined() && targets[i].sizes() != shapes[i].sizes())
      targets[i].resize_(shapes[i].sizes());
}

void make_results(Call& call, const Stack& meta) {
  size_t position = 0;
  const auto& returns = call.schema.returns();
  for (size_t i = 0; i < returns.size(); ++i) {
    if (const auto argument = aliased_argument(call, returns[i])) {
      if (i < meta.size()) resize_like(*argument, meta[i]);
      position += tensors_in(*argument).size();
      call.results.push_back(*argument);
    } else if (has_plain_out(call)) {
      call.results.push_back(call.written.at(i));
      ++position;
    } else {
      call.results.push_back(fresh_result(call, meta.at(i), &position));
    }
  }
}

// Names of the arguments of which this call touches blocks alone.
std::vector<std::string> paged_in(const Call& call) {
  const auto it = paged_arguments().find(call.op.operator_name());
  if (it == paged_arguments().end()) return {};
  for (const auto& name : it->second.block_ids) {
    const auto index = call.schema.argumentIndexWithName(name);
    if (!index || call.arguments[*index].isNone()) return {};
  }
  return it->second.arguments;
}

// Operators of aten over rows of a contiguous tensor touch those that their index names: CANN runs
// `ScatterUpdate` in place, and `GatherV2` (hicann/ops-nn, index/scatter_update/op_api/
// aclnn_index_copy.cpp, commit bd80192). Arguments: self, dim, index, and for the first a source.
constexpr size_t kIndex = 2;

bool takes_rows(const Call& call) {
  const auto& name = call.schema.name();
  if ((name != "aten::index_copy_" && name != "aten::index_select") || call.is_reference ||
      !call.schema.overload_name().empty())
    return false;
  const auto& self = call.arguments[0].toTensor();
  return is_npu(self) && self.dim() > 0 && self.is_contiguous() &&
         call.arguments[1].toInt() == 0 && is_npu(call.arguments[kIndex].toTensor());
}

// `self` and `index` as a worker sees them.
void touch_rows(const at::Tensor& self, const at::Tensor& index, bool write) {
  const auto row = self.stride(0) * static_cast<int64_t>(self.element_size());
  const auto* begin = static_cast<const char*>(self.const_data_ptr());
  const auto rows = index.to(at::kLong).contiguous();
  std::vector<int64_t> named(rows.data_ptr<int64_t>(), rows.data_ptr<int64_t>() + rows.numel());
  std::sort(named.begin(), named.end());
  named.erase(std::unique(named.begin(), named.end()), named.end());
  for (size_t i = 0; i < named.size();) {
    size_t end = i + 1;
    while (end < named.size() && named[end] == named[end - 1] + 1) ++end;
    // The kernel itself refuses an index that is out of range.
    if (named[i] >= 0 && named[end - 1] < self.size(0))
      emulator_touch(begin + named[i] * row, (end - i) * row, write);
    i = end;
  }
}

// The communicator over which an operator exchanges rows between ranks, by the name of its argument.
void* communicator_of(const Call& call) {
  const auto index = call.schema.argumentIndexWithName("group_ep");
  if (!index) return nullptr;
  using Find = void* (*)(const char*);
  static void* const library = dlopen("libhccl.so", RTLD_LAZY | RTLD_NOLOAD);
  static const auto find = library ? reinterpret_cast<Find>(dlsym(library, "emulator_hccl_find"))
                                   : nullptr;
  return find ? find(call.arguments[*index].toStringRef().c_str()) : nullptr;
}

Accesses accesses_of(const Call& call) {
  Accesses out;
  // Calls of one communicator share its buffers, so the program has to order them.
  if (const auto* comm = static_cast<const char*>(communicator_of(call))) {
    TORCH_CHECK(!emulator_note_communication(call.stream, comm), aclGetRecentErrMsg());
    out.push_back({comm, 1, true});
  }
  auto paged = paged_in(call);
  if (takes_rows(call)) paged.push_back(call.schema.arguments()[0].name());
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const auto begin = out.size();
    for (const auto& tensor : tensors_in(call.arguments[i]))
      add_accesses(tensor, call.is_written[i], out);
    const bool by_block =
        std::find(paged.begin(), paged.end(), call.schema.arguments()[i].name()) != paged.end();
    for (auto at = begin; at < out.size(); ++at) out[at].by_block = by_block;
  }
  for (const auto& tensor : call.fresh) add_accesses(tensor, true, out);
  return out;
}

// What the worker needs of a call: no tensor in it owns device memory.
struct Kernel {
  c10::OperatorHandle op;
  std::vector<IValue> arguments;
  std::optional<size_t> generator;  // position of the argument
  RandomState random;
  std::vector<at::Tensor> outputs;
  std::vector<size_t> output_positions;
  bool is_reference, is_captured;

  Stack call() const;
  void run() const;
  void store(const Stack& results) const;
};

std::shared_ptr<Kernel> kernel_of(const Call& call, Accesses& accesses) {
  auto kernel = std::make_shared<Kernel>(Kernel{call.op, {}, {}, {}, {}, call.fresh_positions,
                                                call.is_reference,
                                                bool(emulator_is_capturing(call.stream))});
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const auto& argument = call.arguments[i];
    const bool is_host_target = call.is_written[i] && argument.isTensor() && !is_npu(argument.toTensor());
    kernel->arguments.push_back(is_host_target
                                    ? argument
                                    : map_tensors(argument, kernel_argument, c10::kCPU));
    const auto type = call.schema.arguments()[i].type()->str();
    if (type == "Generator" || type == "Generator?") {
      kernel->generator = i;
      kernel->random = take_random_state(argument, call.device.index(), accesses);
    }
  }
  for (const auto& tensor : call.fresh)
    kernel->outputs.push_back(tensor.defined() ? cpu_alias(tensor) : tensor);
  return kernel;
}

struct InLaunch {
  explicit InLaunch(bool of_graph) { in_launch = of_graph ? kGraph : kLaunch; }
  ~InLaunch() { in_launch = kNothing; }
};

// Whether the CPU multiplies a dtype of 16 bits without instructions of its own for it.
bool is_slow_half(at::ScalarType type) {
  static const bool has_bfloat16 = [] {
    const auto capabilities = at::cpu::get_cpu_capabilities();
    const auto found = capabilities.find("avx512_bf16");
    return found != capabilities.end() && found->second.toBool();
  }();
  return type == at::kHalf || (type == at::kBFloat16 && !has_bfloat16);
}

// Devices sum products of halves in float32 and round once. Many rows of a slow half are given to the
// CPU as floats: the sums are the same, and take a quarter of the time. With instructions for
// bfloat16, floats would take four times as long as halves.
constexpr int64_t kManyRows = 16;

bool has_many_slow_halves(const c10::OperatorName& op, const Stack& stack) {
  static const std::set<std::string> products = {"aten::linear", "aten::mm", "aten::addmm",
                                                 "aten::bmm", "aten::matmul"};
  if (!op.overload_name.empty() || !products.count(op.name)) return false;
  for (const auto& argument : stack)
    for (const auto& each : tensors_in(argument))
      if (each.defined() && (!is_slow_half(each.scalar_type()) || each.dim() < 1)) return false;
  const auto& rows = stack[op.name == "aten::addmm" ? 1 : 0].toTensor();
  return rows.numel() >= kManyRows * rows.size(-1);
}

Stack Kernel::call() const {
  c10::InferenceMode inference(true);
  at::AutoDispatchBelowAutograd below_autograd;
  InLaunch marker(is_captured);
  Stack stack(arguments.begin(), arguments.end());
  if (generator) stack[*generator] = generator_for(random);
  if (is_reference || !has_many_slow_halves(op.operator_name(), stack)) {
    op.callBoxed(&stack);
    return stack;
  }
  const auto dtype = tensors_in(stack[0]).at(0).scalar_type();
  const auto as = [](at::ScalarType type) {
    return [type](const at::Tensor& each) { return each.to(type); };
  };
  for (auto& each : stack) each = map_tensors(each, as(at::kFloat), c10::kCPU);
  op.callBoxed(&stack);
  for (auto& each : stack) each = map_tensors(each, as(dtype), c10::kCPU);
  return stack;
}

void Kernel::store(const Stack& results) const {
  if (outputs.empty()) return;
  std::vector<at::Tensor> flat;
  for (const auto& result : results)
    for (const auto& tensor : tensors_in(result)) flat.push_back(tensor);
  TORCH_CHECK(output_positions.back() < flat.size(), "the kernel returned ", flat.size(),
              " tensors, the Meta function more");
  c10::InferenceMode inference(true);
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto& from = flat.at(output_positions[i]);
    const auto& to = outputs[i];
    // A reference may leave a result that nobody reads, a softmax statistic say, unwritten.
    if (!from.defined() || !to.defined() || (is_reference && from.numel() == 0)) continue;
    // Statistics of half-precision norms: the CPU keeps them in half precision, devices in float32.
    const bool is_statistic = !is_reference && i > 0 && to.scalar_type() == at::kFloat &&
                              at::isReducedFloatingType(from.scalar_type());
    const bool same_dtype = is_statistic || from.dtype() == to.dtype();
    TORCH_CHECK(from.is_cpu(), "result ", i, " is a tensor on ", from.device(),
                ", kernels return CPU tensors");
    TORCH_CHECK(from.sizes() == to.sizes() && same_dtype, "result ", i, " is ",
                from.dtype(), from.sizes(), ", the Meta function says ", to.dtype(), to.sizes());
    to.copy_(from);
  }
}

void Kernel::run() const { store(call()); }

void launch_call(Call& call) {
  auto accesses = accesses_of(call);
  auto kernel = kernel_of(call, accesses);
  if (takes_rows(call)) {
    launch(call.stream, call.schema.name(), accesses, [kernel, write = bool(call.is_written[0])] {
      touch_rows(kernel->arguments[0].toTensor(), kernel->arguments[kIndex].toTensor(), write);
      kernel->run();
    });
    return;
  }
  launch(call.stream, call.schema.name(), accesses, [kernel] { kernel->run(); });
}

// Waits for the result, whose shape only the kernel knows.
void run_and_wait(Call& call) {
  TORCH_CHECK(!emulator_is_capturing(call.stream), call.schema.name(),
              " has to wait for its result and can't be captured: ", call.why_no_shapes);
  auto accesses = accesses_of(call);
  auto kernel = kernel_of(call, accesses);
  auto results = std::make_shared<Stack>();
  launch(call.stream, call.schema.name(), accesses, [=] { *results = kernel->call(); });
  TORCH_CHECK(aclrtSynchronizeStream(call.stream) == 0, aclGetRecentErrMsg());
  const auto upload = [&](const at::Tensor& tensor) {
    auto out = new_result(tensor, call.device);
    Accesses write;
    add_accesses(out, true, write);
    launch(call.stream, call.schema.name() + " (result)", write,
           [to = cpu_alias(out), tensor] {
             c10::InferenceMode inference(true);
             to.copy_(tensor);
           });
    return out;
  };
  for (size_t i = 0; i < results->size(); ++i) {
    const auto argument = aliased_argument(call, call.schema.returns()[i]);
    call.results.push_back(argument ? *argument : map_tensors((*results)[i], upload, call.device));
  }
}

void finish(const Call& call, Stack* stack) {
  torch::jit::drop(*stack, call.schema.arguments().size());
  for (const auto& result : call.results) stack->push_back(result);
}

void run(const c10::OperatorHandle& op, Stack* stack, bool is_reference) {
  auto call = make_call(op, stack, is_reference);
  c10::OptionalDeviceGuard guard(call.device);  // torch_npu sets a device up when it is first set
  call.stream = current_stream(call.device.index());
  count_hidden_copies(op, call.arguments, call.is_written);
  if (const auto meta = meta_results(call)) {
    make_results(call, *meta);
    launch_call(call);
  } else {
    run_and_wait(call);
  }
  finish(call, stack);
}

bool takes_generator(const c10::FunctionSchema& schema) {
  return schema.argumentIndexWithName("generator").has_value();
}

// randperm(n) for instance: the same operator exists with a generator, which is left at None.
bool run_overload_with_generator(const c10::OperatorHandle& op, Stack* stack) {
  if (takes_generator(op.schema()) || !op.hasTag(at::Tag::nondeterministic_seeded)) return false;
  const auto other = c10::Dispatcher::singleton().findSchema({op.schema().name(), "generator"});
  TORCH_CHECK(other, "the emulated device has no generator for ", op.schema().name());
  const size_t count = op.schema().arguments().size();
  Stack given(stack->end() - count, stack->end());
  torch::jit::drop(*stack, count);
  for (const auto& argument : other->schema().arguments()) {
    const auto index = op.schema().argumentIndexWithName(argument.name());
    stack->push_back(index ? given[*index] : IValue());
  }
  other->callBoxed(stack);
  return true;
}

void run_and_report(const std::string& name, const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    emulator_fault((name + ": " + first_line(error.what())).c_str());
  }
}

}  // namespace

void* current_stream(c10::DeviceIndex device) {
  return c10_npu::getCurrentNPUStream(device).stream();
}

void launch(void* stream, const std::string& name, const Accesses& accesses,
            std::function<void()> body) {
  struct Argument {
    std::string name;
    std::function<void()> body;
  };
  auto* argument = new Argument{name, std::move(body)};
  const int error = emulator_launch(
      stream, name.c_str(),
      [](void* a) {
        auto* self = static_cast<Argument*>(a);
        run_and_report(self->name, self->body);
      },
      [](void* a) { delete static_cast<Argument*>(a); }, argument, accesses.data(), accesses.size());
  TORCH_CHECK(error == 0, aclGetRecentErrMsg());
}

void run_as_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const EmulatorInside inside;
  if (!run_overload_with_generator(op, stack)) run(op, stack, false);
}

void run_as_reference(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const EmulatorInside inside;
  run(op, stack, true);
}

void set_written_arguments(const c10::OperatorName& name, std::vector<std::string> arguments) {
  written_arguments()[name] = std::move(arguments);
}

void set_paged_arguments(const c10::OperatorName& name, std::vector<std::string> arguments,
                         std::vector<std::string> block_ids) {
  paged_arguments()[name] = {std::move(arguments), std::move(block_ids)};
}

}  // namespace launcher

// 0 where the calling thread runs no kernel: references refuse to be called with CPU tensors by hand.
// 2 for one that a graph has captured, else 1.
extern "C" __attribute__((visibility("default"))) int emulator_in_launch() {
  return launcher::in_launch;
}
