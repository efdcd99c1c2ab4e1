// Values on the device. Each CUDA operator of torch still runs, so that it allocates what it allocates, with kernels
// that do nothing; then the same operator runs on CPU tensors over the same memory, and its results are copied into
// the CUDA outputs, as work of the current stream.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/op_registration/op_registration.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "core.h"

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

namespace {
thread_local int depth = 0;  // within an operator of ours: what it calls is part of it
struct Deeper {
  Deeper() { ++depth; }
  ~Deeper() { --depth; }
};
struct Below {  // neither autograd nor an operator of ours
  Deeper deeper;
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autograd_dispatch_keyset};
};
std::mutex failures_lock;
std::map<std::string, std::string> failures;

void failed(const std::string& what, const std::string& why) {
  std::lock_guard<std::mutex> guard(failures_lock);
  failures[what] = why.substr(0, 200);
}

Tensor on_cpu(const Tensor& t) {  // a CPU tensor over the same memory, which it does not keep
  if (!t.defined() || !t.is_cuda() || t.layout() != at::kStrided) return t;
  auto data = at::DataPtr(const_cast<void*>(t.storage().data()), at::kCPU);
  auto storage = c10::Storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(data), nullptr, false);
  auto keys = c10::DispatchKeySet(c10::DispatchKey::CPU);
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) out._set_conj(true);
  if (t.is_neg()) out._set_neg(true);
  return out;
}
// Kernels read the host's scalars when they are launched: the host may change them before late work runs.
Tensor argument(const Tensor& t) { return t.defined() && t.is_cpu() && fc_latency_ms() > 0 ? t.clone() : on_cpu(t); }

IValue mapped(const IValue& v, const std::function<Tensor(const Tensor&)>& f) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : v.toTensorVector()) list.push_back(f(t));
    return list;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& t : v.toOptionalTensorVector()) list.push_back(t ? std::optional<Tensor>(f(*t)) : std::nullopt);
    return list;
  }
  return v;
}
Stack on_cpu(const Stack& args, const std::function<Tensor(const Tensor&)>& f) {
  Stack out;
  for (const IValue& v : args) {
    if (v.isDevice() && v.toDevice().is_cuda())
      out.push_back(c10::Device(at::kCPU));
    else
      out.push_back(v.isGenerator() ? IValue() : mapped(v, f));  // values come from the CPU's own generator
  }
  return out;
}
template <typename F>
void each_on_cuda(const Stack& values, const F& f) {
  for (const IValue& v : values)
    mapped(v, [&](const Tensor& t) {
      if (t.defined() && t.is_cuda()) f(t);
      return t;
    });
}

// Whether all are small, or small enough and all of integers: the host reads masks and positions.
bool worth_it(const Stack& values) {
  static const int64_t most = (int64_t)fc_number("FAKE_CUDA_COMPUTE_MAX", 4 << 20);
  bool small = true, small_integers = true;
  each_on_cuda(values, [&](const Tensor& t) {
    small = small && t.numel() <= most;
    small_integers = small_integers && t.numel() <= 4 << 20 && at::isIntegralType(t.scalar_type(), true);
  });
  return small || small_integers;
}

void write(const Tensor& to, const Tensor& from) {  // both are CPU tensors
  if (!to.defined() || !from.defined()) return;
  if (to.data_ptr() == from.data_ptr() && to.numel() == from.numel()) return;
  Tensor a = to;
  if (a.dim() == 3 && from.dim() == 3 && !a.size(2)) return;  // attention without gradients has no logsumexp
  if (a.dim() == 3 && from.dim() == 3 && a.size(2) > from.size(2) && a.size(1) == from.size(1))
    a = a.narrow(2, 0, from.size(2));  // efficient attention pads its logsumexp
  if (a.numel() == from.numel())
    a.copy_(from.reshape(a.sizes()));
  else
    failed("output", std::to_string(a.numel()) + " elements, computed " + std::to_string(from.numel()));
}

// ---- operators that the CPU does not have

std::optional<double> number(const IValue& v) { return v.isNone() ? std::optional<double>() : v.toDouble(); }
std::optional<Tensor> mask(const IValue& v) {
  return v.isTensor() && v.toTensor().defined() ? std::optional<Tensor>(v.toTensor()) : std::nullopt;
}
struct Attention {  // query, key, value and the rest of a forward call; dropout inside of it is not applied
  Tensor q, k, v;
  bool causal;
  std::optional<Tensor> bias;
  std::optional<double> scale;
  int64_t groups() const { return q.size(1) / k.size(1); }
  Tensor wide(const Tensor& t) const { return groups() > 1 ? t.repeat_interleave(groups(), 1) : t; }
  Tensor narrow(const Tensor& t) const { return groups() > 1 ? t.unflatten(1, {k.size(1), groups()}).sum(2) : t; }
  Stack forward() const {
    auto [o, l] = at::_scaled_dot_product_flash_attention_for_cpu(q, wide(k), wide(v), 0.0, causal, bias, scale);
    return {o, l};
  }
  Stack backward(const Tensor& grad, const Tensor& out, Tensor lse) const {
    if (lse.dim() == 4) lse = lse.squeeze(3);
    if (lse.size(2) != q.size(2)) lse = lse.narrow(2, 0, q.size(2)).contiguous();
    auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(grad, q, wide(k), wide(v), out, lse,
                                                                                 0.0, causal, bias, scale);
    return {dq, narrow(dk), narrow(dv)};
  }
};
bool attention(const std::string& name, Stack& s) {
  auto t = [&](int i) { return s[i].toTensor(); };
  const std::string sdpa = "aten::_scaled_dot_product_";
  if (name == sdpa + "flash_attention")
    s = Attention{t(0), t(1), t(2), s[4].toBool(), {}, number(s[6])}.forward();
  else if (name == sdpa + "efficient_attention")
    s = Attention{t(0), t(1), t(2), s[6].toBool(), mask(s[3]), number(s[7])}.forward();
  else if (name == sdpa + "cudnn_attention")
    s = Attention{t(0), t(1), t(2), s[6].toBool(), mask(s[3]), number(s[8])}.forward();
  else if (name == sdpa + "flash_attention_backward")
    s = Attention{t(1), t(2), t(3), s[11].toBool(), {}, number(s[14])}.backward(t(0), t(4), t(5));
  else if (name == sdpa + "efficient_attention_backward")
    s = Attention{t(1), t(2), t(3), s[11].toBool(), mask(s[4]), number(s[12])}.backward(t(0), t(5), t(6));
  else if (name == sdpa + "cudnn_attention_backward")
    s = Attention{t(1), t(2), t(3), s[14].toBool(), mask(s[8]), number(s[15])}.backward(t(0), t(4), t(5));
  else
    return false;
  return true;
}
bool convolution(const std::string& name, Stack& s) {
  auto ints = [&](int i) { return s[i].toIntVector(); };
  if (name == "aten::cudnn_convolution")
    s = {
        at::convolution(s[0].toTensor(), s[1].toTensor(), {}, ints(3), ints(2), ints(4), false, {0, 0}, s[5].toInt())};
  else if (name == "aten::_conv_depthwise2d")
    s = {at::convolution(s[0].toTensor(), s[1].toTensor(), mask(s[3]), ints(4), ints(5), ints(6), false, {0, 0},
                         s[0].toTensor().size(1))};
  else
    return false;
  return true;
}

// CUDA's kernel does without the buffer that the CPU's forward fills.
bool log_sigmoid_backward(const std::string& name, Stack& s) {
  if (name != "aten::log_sigmoid_backward") return false;
  s = {s[0].toTensor() * at::sigmoid(-s[1].toTensor())};
  return true;
}

// CUDA's softmax takes half values to floats, and gradients back: the CPU's is given floats.
void widen_softmax(const std::string& name, Stack& s) {
  if ((name == "aten::_softmax" || name == "aten::_log_softmax") && s[2].toBool()) {
    s[0] = s[0].toTensor().to(at::kFloat);
    s[2] = false;
  }
  if (name == "aten::_softmax_backward_data" || name == "aten::_log_softmax_backward_data")
    s[3] = s[0].toTensor().scalar_type();
}

// ---- operators whose CUDA kernel is not called, as it is cuDNN's: their outputs, allocated as it does, without its
// workspace

Tensor convolved(const Stack& s) {
  Tensor in = s[0].toTensor(), weight = s[1].toTensor();
  auto padding = s[2].toIntVector(), stride = s[3].toIntVector(), dilation = s[4].toIntVector();
  std::vector<int64_t> sizes{in.size(0), weight.size(0)};
  for (int64_t i = 2; i < in.dim(); i++)
    sizes.push_back((in.size(i) + 2 * padding[i - 2] - dilation[i - 2] * (weight.size(i) - 1) - 1) / stride[i - 2] +
                    1);
  return at::empty(sizes, in.options().memory_format(in.suggest_memory_format()));
}
std::optional<Stack> outputs_without_kernel(const std::string& name, const Stack& s) {
  if (name == "aten::cudnn_convolution") return Stack{convolved(s)};
  if (name == "aten::convolution_backward") {
    auto wanted = s[10].toBoolList();
    auto like = [&](int i, const Tensor& t) { return wanted[i] ? at::empty_like(t) : Tensor(); };
    Tensor grad = s[0].toTensor();
    Tensor bias = wanted[2] ? at::empty({grad.size(1)}, grad.options()) : Tensor();
    return Stack{like(0, s[1].toTensor()), like(1, s[2].toTensor()), bias};
  }
  if (name == "aten::_scaled_dot_product_cudnn_attention") {
    Tensor q = s[0].toTensor(), k = s[1].toTensor(), v = s[2].toTensor();
    Tensor out = at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options()).transpose(1, 2);
    Tensor lse = at::empty({q.size(0), q.size(1), q.size(2), 1}, q.options().dtype(at::kFloat));
    Tensor seed = at::empty({}, q.options().dtype(at::kLong));
    return Stack{out, lse, Tensor(), Tensor(), q.size(2), k.size(2), seed, at::empty_like(seed), Tensor()};
  }
  if (name == "aten::_scaled_dot_product_cudnn_attention_backward")
    return Stack{at::empty_like(s[1].toTensor()), at::empty_like(s[2].toTensor()), at::empty_like(s[3].toTensor())};
  return std::nullopt;
}

// ---- an operator

struct Job {  // on CPU tensors over the device's memory
  c10::OperatorHandle op;
  Stack args, outputs;
  void call(Stack& s) const {
    const std::string& name = op.schema().name();
    if (attention(name, s) || convolution(name, s) || log_sigmoid_backward(name, s)) return;
    widen_softmax(op.schema().name(), s);
    op.callBoxed(&s);
  }
  void run() const {
    Below below;
    bool wide = false;
    Stack found = args;
    try {
      call(found);
    } catch (
        const std::exception&) {  // layer norm's statistics: a CUDA kernel mixes bf16 with float, the CPU's do not
      wide = true;
      found = on_cpu(args, [](const Tensor& t) {
        return t.defined() && t.is_floating_point() && t.element_size() == 2 ? t.to(at::kFloat) : t;
      });
      try {
        call(found);
      } catch (const std::exception& error) {
        failed(c10::toString(op.operator_name()), error.what());
        return;
      }
    }
    for (size_t i = 0; i < found.size() && i < outputs.size(); i++) {
      const auto* alias = op.schema().returns()[i].alias_info();
      if (alias && alias->isWrite() && !wide) continue;  // written in place
      if (i && op.schema().name() == "aten::log_sigmoid_forward") continue;  // the buffer
      if (found[i].isTensor() && outputs[i].isTensor()) write(outputs[i].toTensor(), found[i].toTensor());
      if (found[i].isTensorList() && outputs[i].isTensorList()) {
        auto to = outputs[i].toTensorVector(), from = found[i].toTensorVector();
        for (size_t k = 0; k < to.size() && k < from.size(); k++) write(to[k], from[k]);
      }
    }
  }
};
void run_job(void* data) { std::unique_ptr<Job>(static_cast<Job*>(data))->run(); }

struct Kernel final : c10::OperatorKernel {
  c10::SafeKernelFunction of_torch;
  enum Kind { PLAIN, READS, COPIES, UNKNOWN } kind;  // reads: the shape of the result depends on values
  Kernel(c10::SafeKernelFunction k, Kind of) : of_torch(std::move(k)), kind(of) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    Stack args(stack->end() - op.schema().arguments().size(), stack->end());
    if (kind == READS) return read(op, args, stack);
    bool across = kind == COPIES && args[0].toTensor().is_cuda() != args[1].toTensor().is_cuda();
    if (depth > 0 || across)
      return of_torch.callBoxed(op, keys, stack);  // the device copies between itself and the host
    if (auto outputs = outputs_without_kernel(op.schema().name(), args)) {
      torch::jit::drop(*stack, args.size());
      stack->insert(stack->end(), outputs->begin(), outputs->end());
    } else {
      Deeper deeper;
      of_torch.callBoxed(op, keys, stack);
    }
    Stack outputs(stack->end() - op.schema().returns().size(), stack->end()), all = args;
    all.insert(all.end(), outputs.begin(), outputs.end());
    if (!worth_it(all)) return;
    if (kind == UNKNOWN) return failed(op.schema().name(), "the CPU has no such operator");
    auto stream = c10::cuda::getCurrentCUDAStream();
    each_on_cuda(all, [&](const Tensor& t) { stream = c10::cuda::getCurrentCUDAStream(t.get_device()); });
    auto cpu = [](const Tensor& t) { return on_cpu(t); };
    Below below;
    auto job = std::make_unique<Job>(Job{op, on_cpu(args, argument), on_cpu(outputs, cpu)});
    if (op.hasTag(at::Tag::nondeterministic_seeded)) {  // the order of random numbers is the host's
      stream.synchronize();
      return job->run();
    }
    fc_queue(fc_stream_of(stream.stream()), run_job, job.release());
  }

  static void read(const c10::OperatorHandle& op, const Stack& args, Stack* stack) {
    c10::Device device(at::kCUDA, 0);
    each_on_cuda(args, [&](const Tensor& t) { device = t.device(); });
    c10::cuda::getCurrentCUDAStream(device.index()).synchronize();
    Stack found = on_cpu(args, [](const Tensor& t) { return on_cpu(t); });
    {
      Below below;
      op.callBoxed(&found);
    }
    torch::jit::drop(*stack, args.size());
    for (const IValue& v : found)
      stack->push_back(mapped(v, [&](const Tensor& t) { return t.defined() ? t.to(device) : t; }));
  }
};

std::vector<std::unique_ptr<torch::Library>> libraries;
const std::set<std::string> reading{"nonzero",
                                    "equal",
                                    "masked_select",
                                    "_unique2",
                                    "unique_dim",
                                    "unique_consecutive",
                                    "_local_scalar_dense",
                                    "bincount",
                                    "repeat_interleave"};
const std::set<std::string> left{// views, storage, and questions
                                 "set_",
                                 "resize_",
                                 "resize",
                                 "record_stream",
                                 "_record_stream",
                                 "is_pinned",
                                 "_pin_memory",
                                 "empty",
                                 "empty_strided",
                                 "_efficientzerotensor",
                                 "is_set_to",
                                 "unfold",
                                 "as_strided",
                                 "view",
                                 "_reshape_alias",
                                 "view_as_real",
                                 "view_as_complex",
                                 "alias",
                                 "_copy_from",
                                 "_nested_view_from_buffer",
                                 "_cudnn_init_dropout_state",
                                 "_fused_sdp_choice",
                                 "_use_cudnn_ctc_loss",
                                 "_use_miopen_ctc_loss",
                                 "_use_cudnn_rnn_flatten_weight"};
}  // namespace

// Of operators of one namespace, registered by now.
extern "C" int cuda_software_install(const char* space) {
  struct Quiet : c10::WarningHandler {  // that kernels are replaced
    void process(const c10::Warning&) override {}
  } quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  auto& dispatcher = c10::Dispatcher::singleton();
  const std::set<std::string> only_cuda{"cudnn_convolution", "_conv_depthwise2d"};
  for (const auto& full : dispatcher.getAllOpNames()) {
    if (full.name.rfind(std::string(space) + "::", 0) != 0) continue;
    std::string name = full.name.substr(std::strlen(space) + 2);
    auto op = dispatcher.findSchema(full);
    if (!op || left.count(name)) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) && name != "copy_") continue;
    bool known = op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU) || only_cuda.count(name) ||
                 name.rfind("_scaled_dot_product_", 0) == 0;
    bool reads = reading.count(name) && full.overload_name.find("out") == std::string::npos;
    auto kind = !known ? Kernel::UNKNOWN : name == "copy_" ? Kernel::COPIES : reads ? Kernel::READS : Kernel::PLAIN;
    auto kernel = std::make_unique<Kernel>(op->getComputedKernelForDispatchKey(c10::DispatchKey::CUDA), kind);
    auto key = c10::make_optional(c10::DispatchKey::CUDA);
    libraries.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, space, key, __FILE__, __LINE__));
    libraries.back()->impl((name + (full.overload_name.empty() ? "" : "." + full.overload_name)).c_str(),
                           torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
  }
  return (int)libraries.size();
}
extern "C" const char* cuda_software_failures() {
  static std::string text;
  std::lock_guard<std::mutex> guard(failures_lock);
  text.clear();
  for (const auto& [what, why] : failures) text += what + ": " + why + "\n";
  return text.c_str();
}
