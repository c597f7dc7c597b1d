// SPDX-License-Identifier: Apache-2.0
// segscatter._C: what Python needs from C++ besides the operators. Knows no torch; its absence costs only speed.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "encode.h"
#include "segscatter/version.h"

// Facts that only the build knows; CMake defines them.
#ifndef SEGSCATTER_BUILD_TORCH_VERSION
#define SEGSCATTER_BUILD_TORCH_VERSION ""
#endif
#ifndef SEGSCATTER_BUILD_CUDA_VERSION
#define SEGSCATTER_BUILD_CUDA_VERSION ""
#endif
#ifndef SEGSCATTER_BUILD_CUDA_ARCHITECTURES
#define SEGSCATTER_BUILD_CUDA_ARCHITECTURES ""
#endif

namespace py = pybind11;

namespace segscatter::python {
namespace {

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "gcc " __VERSION__;
#elif defined(_MSC_VER)
  return "msvc " + std::to_string(_MSC_VER);
#else
  return "unknown";
#endif
}

py::dict build_info() {
  py::dict info;
  info["version"] = SEGSCATTER_VERSION;
  info["compiler"] = compiler();
  info["cplusplus"] = static_cast<long>(__cplusplus);
  info["torch_version"] = SEGSCATTER_BUILD_TORCH_VERSION;
  info["cuda_version"] = SEGSCATTER_BUILD_CUDA_VERSION;
  info["cuda_architectures"] = SEGSCATTER_BUILD_CUDA_ARCHITECTURES;
  return info;
}

constexpr std::int32_t kUnknownType = -2;  // next to NameTable::kAbsent: the table cannot say

// Looks up strings as they are, and integers in decimal behind `int_prefix`: with "" 1 is the name "1", while a byte
// that UTF-8 does not use keeps the two apart.
std::int32_t find(const NameTable& table, PyObject* name, std::string_view int_prefix) {
  if (PyUnicode_CheckExact(name)) {  // a subclass may have another str()
    py::ssize_t size = 0;
    if (const char* const text = PyUnicode_AsUTF8AndSize(name, &size)) {
      return table.find({text, static_cast<std::size_t>(size)});
    }
    PyErr_Clear();                       // lone surrogates
  } else if (PyLong_CheckExact(name)) {  // not bool
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(name, &overflow);
    if (overflow == 0) return table.find(std::string(int_prefix).append(std::to_string(value)));
  }
  return kUnknownType;
}

// Ids of objects met lately: a batch often holds the same few objects over and over. The list keeps its objects
// alive during the call, so an address stands for one name.
class RecentNames {
 public:
  std::int32_t find(const PyObject* name) const noexcept {
    const Entry& entry = entries_[slot(name)];
    return entry.name == name ? entry.id : NameTable::kAbsent;
  }
  void insert(const PyObject* name, std::int32_t id) noexcept { entries_[slot(name)] = {name, id}; }

 private:
  struct Entry {
    const PyObject* name = nullptr;
    std::int32_t id = NameTable::kAbsent;
  };
  static constexpr std::size_t kEntries = 64;
  static std::size_t slot(const PyObject* name) noexcept {
    return reinterpret_cast<std::uintptr_t>(name) / alignof(std::max_align_t) % kEntries;
  }

  std::array<Entry, kEntries> entries_{};
};

// Writes the id of names[i] to ids[i], `none_id` for None, `unseen_id` for names that the table lacks. Positions that
// this cannot settle are left unwritten and returned: names that are not None, string or integer, strings without a
// UTF-8 form, None when none_id < 0, names that the table lacks when unseen_id < 0. The second result counts the names
// that took unseen_id.
std::pair<std::vector<py::ssize_t>, std::int64_t> encode(const NameTable& table, const py::list& names,
                                                         std::int32_t* ids, std::int32_t none_id,
                                                         std::int32_t unseen_id, std::string_view int_prefix) {
  std::vector<py::ssize_t> unresolved;
  std::int64_t unseen = 0;
  RecentNames recent;
  const py::ssize_t size = PyList_GET_SIZE(names.ptr());
  for (py::ssize_t i = 0; i < size; ++i) {
    PyObject* const name = PyList_GET_ITEM(names.ptr(), i);
    std::int32_t id = name == Py_None ? none_id : recent.find(name);
    if (id < 0 && name != Py_None) {
      id = find(table, name, int_prefix);
      if (id >= 0) recent.insert(name, id);
      if (id == NameTable::kAbsent && unseen_id >= 0) {
        id = unseen_id;
        ++unseen;
      }
    }
    if (id >= 0) {
      ids[i] = id;
    } else {
      unresolved.push_back(i);
    }
  }
  return {std::move(unresolved), unseen};
}

}  // namespace
}  // namespace segscatter::python

PYBIND11_MODULE(_C, m) {
  namespace sp = segscatter::python;
  m.doc() = "segscatter's torch-free helpers";
  m.def("build_info", &sp::build_info, "What this library was built from and with: a dict of strings and numbers.");
  py::class_<sp::NameTable>(m, "NameTable", "Channel names and their ids.")
      .def(py::init<>())
      .def("insert", &sp::NameTable::insert, py::arg("name"), py::arg("id"), "name: str, or UTF-8 bytes.")
      .def("__len__", &sp::NameTable::size)
      .def(
          "encode",
          [](const sp::NameTable& table, const py::list& names, std::uintptr_t ids, std::int32_t none_id,
             std::int32_t unseen_id, std::string_view int_prefix) {
            return sp::encode(table, names, reinterpret_cast<std::int32_t*>(ids), none_id, unseen_id, int_prefix);
          },
          py::arg("names"), py::arg("ids"), py::arg("none_id"), py::arg("unseen_id"), py::arg("int_prefix"),
          "Writes int32 ids to the address `ids`, which must have room for len(names). Returns the positions left "
          "unwritten, and how many names got unseen_id.");
}
