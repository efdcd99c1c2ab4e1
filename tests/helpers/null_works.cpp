// A backend that computes with another one and returns no work where the caller asked for none, as ProcessGroupNCCL does since torch 2.8.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

using c10d::Backend;
using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;
using Work = c10::intrusive_ptr<c10d::Work>;

class NullWorks : public Backend {
 public:
  explicit NullWorks(c10::intrusive_ptr<Backend> inner) : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override { return "nullworks"; }
  void setSequenceNumberForGroup() override { inner_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { coalescing_ = true; }
  Work endCoalescing() override {
    coalescing_ = false;
    return std::move(last_);
  }

  Work broadcast(Tensors& t, const c10d::BroadcastOptions& o) override { return given(inner_->broadcast(t, o), o.asyncOp); }
  Work allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    auto summed = with_sum(o);
    return given(inner_->allreduce(t, summed), o.asyncOp, divided(t, o.reduceOp));
  }
  Work allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    return given(inner_->allreduce_coalesced(t, o), o.asyncOp);
  }
  Work reduce(Tensors& t, const c10d::ReduceOptions& o) override { return given(inner_->reduce(t, o), o.asyncOp); }
  Work allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return given(inner_->allgather(out, in, o), o.asyncOp);
  }
  Work _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    return given(inner_->_allgather_base(out, in, o), o.asyncOp);
  }
  Work allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return each(out, in, o, [this](at::Tensor& a, at::Tensor& b, const c10d::AllgatherOptions& p) { return _allgather_base(a, b, p); });
  }
  Work gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& o) override {
    return given(inner_->gather(out, in, o), o.asyncOp);
  }
  Work scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& o) override {
    return given(inner_->scatter(out, in, o), o.asyncOp);
  }
  Work _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    auto summed = with_sum(o);
    Tensors tensors{out};
    return given(inner_->_reduce_scatter_base(out, in, summed), o.asyncOp, divided(tensors, o.reduceOp));
  }
  Work reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    return each(out, in, o, [this](at::Tensor& a, at::Tensor& b, const c10d::ReduceScatterOptions& p) {
      return _reduce_scatter_base(a, b, p);
    });
  }
  Work alltoall_base(
      at::Tensor& out, at::Tensor& in, std::vector<int64_t>& outs, std::vector<int64_t>& ins, const c10d::AllToAllOptions& o) override {
    return given(inner_->alltoall_base(out, in, outs, ins, o), o.asyncOp);
  }
  Work barrier(const c10d::BarrierOptions& o) override { return given(inner_->barrier(o), o.asyncOp); }
  Work send(Tensors& t, int to, int tag) override { return inner_->send(t, to, tag); }
  Work recv(Tensors& t, int from, int tag) override { return inner_->recv(t, from, tag); }

 private:
  // Gloo has no AVG.
  template <typename Options>
  static Options with_sum(Options options) {
    if (options.reduceOp == ReduceOp::AVG) options.reduceOp = ReduceOp::SUM;
    return options;
  }
  static Tensors divided(const Tensors& tensors, const ReduceOp& op) { return op == ReduceOp::AVG ? tensors : Tensors{}; }

  Work given(Work work, bool asyncOp, Tensors divide = {}) {
    if (!asyncOp || coalescing_ || !divide.empty()) work->wait();
    for (auto& tensor : divide) tensor.div_(getSize());
    if (coalescing_) last_ = work;
    return asyncOp && !coalescing_ ? work : Work{};
  }
  template <typename Options, typename Act>
  Work each(Tensors& out, Tensors& in, const Options& options, Act act) {
    Work last;
    for (size_t i = 0; i < out.size(); ++i) {
      if (last) last->wait();  // gloo's works are each their own; as with NCCL, the one that is returned stands for all
      last = act(out[i], in[i], options);
    }
    return last;
  }

  c10::intrusive_ptr<Backend> inner_;
  bool coalescing_ = false;
  Work last_;
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("wrap", [](const c10::intrusive_ptr<Backend>& inner) -> c10::intrusive_ptr<Backend> { return c10::make_intrusive<NullWorks>(inner); });
}
