// One function that torch does not offer to Python: a tensor made like another, on another storage.

#include <ATen/core/Tensor.h>
#include <ATen/ops/as_strided.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/utils/pybind.h>

namespace {

// A tensor with the sizes of `pattern`, and with all that is known of them (whether they are contiguous, their product):
// as a view of `base`, or on a new storage of the size that the pattern's has.
at::Tensor like(const at::Tensor& pattern, const std::optional<at::Tensor>& base) {
  if (base.has_value() && base->key_set() != pattern.key_set()) {
    return at::as_strided_symint(*base, pattern.sym_sizes(), pattern.sym_strides(), pattern.sym_storage_offset());
  }
  c10::VariableVersion version;  // of an inference tensor: none
  if (base.has_value()) {
    version = base->unsafeGetTensorImpl()->version_counter();
  } else if (!pattern.is_inference()) {
    version = c10::VariableVersion(/*version=*/0);
  }
  auto made = pattern.unsafeGetTensorImpl()->shallow_copy_and_detach(
      std::move(version), /*allow_tensor_metadata_change=*/true);
  if (base.has_value()) {
    made->set_storage_keep_dtype(base->storage());
  } else {
    const at::Storage& storage = pattern.storage();
    made->set_storage_keep_dtype(at::Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(),
        storage.sym_nbytes(),
        at::DataPtr(nullptr, storage.device()),
        storage.allocator(),
        storage.resizable())));
  }
  return at::Tensor(std::move(made));
}

}  // namespace

PYBIND11_MODULE(fake_native, module) {
  module.def("like", &like);
}
