// NumPy's arrays as the kernels see them, and new ones for results. Included by module.cpp alone.
#pragma once
#define PY_SSIZE_T_CLEAN
#if !defined(Py_GIL_DISABLED) && !defined(Py_LIMITED_API)
#define Py_LIMITED_API 0x030b0000
#endif
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#include <Python.h>
#include <numpy/arrayobject.h>

#include <cstring>
#include <initializer_list>

#include "jobs.h"
#include "memory.h"

namespace {

int bfloat16 = -1;

bool fail(PyObject* kind, const char* format, PyObject* value) { return PyErr_Format(kind, format, value), false; }

bool is_given(PyObject* object) { return object != Py_None; }

// ---- arrays ----

bool type_of(PyArrayObject* a, Type& type) {
    int number = PyArray_TYPE(a);
    if (number == NPY_FLOAT) return type = F32, true;
    if (number == NPY_HALF) return type = F16, true;
    if (number == NPY_DOUBLE) return type = F64, true;
    if (number == bfloat16) return type = BF16, true;
    if (number == NPY_VOID && PyArray_ITEMSIZE(a) == BYTES[PARTIAL]) return type = PARTIAL, true;
    if (number >= NPY_USERDEF) {
        PyObject* name = PyObject_GetAttrString((PyObject*)PyArray_DESCR(a), "name");
        bool same = name && PyUnicode_CompareWithASCIIString(name, "bfloat16") == 0;
        Py_XDECREF(name);
        if (same) return bfloat16 = number, type = BF16, true;
    }
    return fail(PyExc_TypeError, "no kernel is for %R", (PyObject*)PyArray_DESCR(a));
}

PyArrayObject* array_of(PyObject* object) {
    if (PyArray_Check(object)) return (PyArrayObject*)object;
    return fail(PyExc_TypeError, "an array is needed, got %R", object), nullptr;
}

// The elements of a vector, or None.
template <class T> bool vector_of(PyObject* object, T*& to, Type* type = nullptr, Index* apart = nullptr) {
    to = nullptr;
    if (!is_given(object)) return true;
    PyArrayObject* a = array_of(object);
    if (!a) return false;
    int ndim = PyArray_NDIM(a);
    bool whole = PyArray_IS_C_CONTIGUOUS(a) || (apart && ndim == 2 && PyArray_STRIDE(a, 1) == PyArray_ITEMSIZE(a));
    if (!whole) return fail(PyExc_ValueError, "a contiguous array is needed, got %R", object);
    if (apart) *apart = PyArray_STRIDE(a, 0);
    to = (T*)PyArray_DATA(a);
    return !type || type_of(a, *type);
}

// Merges neighbouring axes that lie as one, and leaves those of length 1 out; returns how many are left.
int merge_axes(PyArrayObject* a, int first, int stop, Index* lengths, Index* strides) {
    int count = 0;
    for (int k = first; k < stop; k++) {
        Index length = PyArray_DIM(a, k), stride = PyArray_STRIDE(a, k);
        if (length == 1) continue;
        if (count && strides[count - 1] == length * stride) lengths[count - 1] *= length, strides[count - 1] = stride;
        else lengths[count] = length, strides[count++] = stride;
    }
    if (!count) lengths[0] = 1, strides[0] = 0, count = 1;
    return count;
}

// Sees an array as rows; or a tuple of one, how many of its axes count rows, by default all but the last, and the
// numbers of the rows that are meant, or None. None is missing. Of samples, the first axis counts these.
bool see(PyObject* object, Array& to, Index* apart = nullptr) {
    if (!is_given(object)) return true;
    int lead = -1;
    if (PyTuple_Check(object)) {
        PyObject* numbers = PyTuple_GetItem(object, 2);
        if (!vector_of(numbers, to.numbers)) return false;
        if (is_given(numbers)) to.count = PyArray_SIZE((PyArrayObject*)numbers);
        lead = (int)PyLong_AsLong(PyTuple_GetItem(object, 1)), object = PyTuple_GetItem(object, 0);
    }
    PyArrayObject* a = array_of(object);
    if (!a || !type_of(a, to.type)) return false;
    int ndim = PyArray_NDIM(a), start = apart ? 1 : 0;
    if (lead < 0) lead = ndim - 1;
    if (lead > ndim || start > lead) return fail(PyExc_ValueError, "rows are needed, got %R", (PyObject*)a);
    if (apart) *apart = PyArray_STRIDE(a, 0);
    to.data = PyArray_BYTES(a);
    to.lead = merge_axes(a, start, lead, to.lengths, to.strides);
    to.axes = merge_axes(a, lead, ndim, to.lengths + to.lead, to.strides + to.lead);
    Index length = to.lengths[to.lead], stride = to.strides[to.lead];
    to.whole = to.axes == 1 && (length == 1 || stride == BYTES[to.type]);
    if (to.count < 0) to.count = 1;
    else return true;
    for (int k = start; k < lead; k++) to.count *= PyArray_DIM(a, k);
    return true;
}

// ---- memory of large results: NumPy's own way to bring it along ----

// Below, NumPy's cache and malloc do as well.
constexpr Index LARGE = 1 << 20;

void* handler_malloc(void*, size_t size) { return memory::take(size); }
void* handler_calloc(void*, size_t count, size_t size) {
    void* found = size && count > SIZE_MAX / size ? nullptr : memory::take(count * size);
    return found ? memset(found, 0, count * size) : nullptr;
}
void* handler_realloc(void*, void* old, size_t size) { return memory::grow(old, size); }
void handler_free(void*, void* old, size_t) { memory::give(old); }
PyDataMem_Handler handler = {"stablenorm", 1, {nullptr, handler_malloc, handler_calloc, handler_realloc, handler_free}};
PyObject* capsule;

// Asked at the first large result how many bytes may be kept: a worker of Dask has its own limit by then.
PyObject* default_limit;

bool set_limit(PyObject* value) {
    size_t limit = value ? PyLong_AsSize_t(value) : 0;
    if (PyErr_Occurred()) return false;
    Py_CLEAR(default_limit);
    return memory::set_limit(limit), true;
}

// A new array, a large one in recycled memory: it keeps the handler, and gives its memory to that when it goes.
PyObject* new_array(PyArray_Descr* descr, int ndim, const npy_intp* shape) {
    Index elements = 1;
    for (int k = 0; k < ndim; k++) elements *= shape[k];
    bool large = elements * (Index)PyDataType_ELSIZE(descr) >= LARGE;
    if (large && default_limit) {
        PyObject* limit = PyObject_CallNoArgs(default_limit);
        bool known = set_limit(limit);
        Py_XDECREF(limit);
        if (!known) return nullptr;
    }
    Py_INCREF((PyObject*)descr);
    PyObject* before = large ? PyDataMem_SetHandler(capsule) : nullptr;
    PyObject* array = PyArray_NewFromDescr(&PyArray_Type, descr, ndim, shape, nullptr, nullptr, 0, nullptr);
    if (large) {
        PyObject* ours = PyDataMem_SetHandler(before);
        Py_XDECREF(ours), Py_XDECREF(before);
    }
    return array;
}

}  // namespace
