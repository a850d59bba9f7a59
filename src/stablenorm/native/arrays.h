// NumPy's arrays as plain rows, and new ones for results. Included by module.cpp alone.
#pragma once
#define PY_SSIZE_T_CLEAN
#if !defined(Py_GIL_DISABLED) && !defined(Py_LIMITED_API)
#define Py_LIMITED_API 0x030b0000
#endif
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#include <Python.h>
#include <numpy/arrayobject.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <utility>

#include "jobs.h"
#include "memory.h"

namespace {

// The scalar types of the four dtypes, in the order of `Type`. New dtypes of others share type
// numbers; these share nothing.
PyObject* scalar_types[4];

bool is_given(PyObject* object) { return object != Py_None; }

bool type_of(PyArrayObject* a, Type& type) {
    for (Type known : {F32, BF16, F16, F64})
        if ((PyObject*)PyArray_DESCR(a)->typeobj == scalar_types[known]) {
            type = known;
            return true;
        }
    return false;
}

// True for an array of NumPy's own class with elements, of floats in this machine's byte order.
bool is_of_floats(PyObject* object, Type& type) {
    if (!PyArray_CheckExact(object)) return false;
    PyArrayObject* a = (PyArrayObject*)object;
    return !PyArray_ISBYTESWAPPED(a) && PyArray_NDIM(a) && PyArray_SIZE(a) && type_of(a, type);
}

// The normalized axes of an array, a bit for each: of None, an int, or a tuple that names them in
// order; 0 for anything else.
uint64_t axes_of(PyObject* given, int ndim) {
    uint64_t axes = 0;
    if (!is_given(given)) return ~axes >> (64 - ndim);
    Py_ssize_t count = PyTuple_Check(given) ? PyTuple_Size(given) : 1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject* number = PyTuple_Check(given) ? PyTuple_GetItem(given, i) : given;
        int overflow = 0;
        long axis = PyLong_CheckExact(number) ? PyLong_AsLongAndOverflow(number, &overflow) : ndim;
        if (axis < 0) axis += ndim;
        if (overflow || axis < 0 || axis >= ndim || axes >> axis) return 0;
        axes |= uint64_t{1} << axis;
    }
    return axes;
}

// Equal steps: some axes of an array, of which one steps over all of the next.
struct Steps {
    Index length = 1;
    Index stride = 0;
    bool add(Index count, Index distance) {
        bool fits = length == 1 || count == 1 || distance == length * stride;
        if (length == 1) stride = distance;
        if (fits) length *= count;
        return fits;
    }
};

// Sees an array as rows, by its normalized axes: columns of equal steps, and runs of rows.
bool see_rows(PyObject* object, uint64_t axes, Rows& rows) {
    if (!is_of_floats(object, rows.type)) return false;
    PyArrayObject* a = (PyArrayObject*)object;
    Index bytes = BYTES[rows.type];
    int last = PyArray_NDIM(a) - 1;
    rows = {PyArray_BYTES(a), rows.type, PyArray_DIM(a, last) * bytes, 0, 0, bytes};
    // The usual case: (1, 1, 64) saves 0.1 us.
    if (PyArray_IS_C_CONTIGUOUS(a) && axes == uint64_t{1} << last) return true;
    Steps columns, run, runs;
    for (int k = last; k >= 0; k--) {
        Index length = PyArray_DIM(a, k);
        Index stride = PyArray_STRIDE(a, k);
        bool fits = axes >> k & 1
                        ? columns.add(length, stride)
                        : (runs.length == 1 && run.add(length, stride)) || runs.add(length, stride);
        if (!fits) return false;
    }
    rows.apart = columns.length > 1 ? columns.stride : bytes;
    rows.stride = run.length > 1 ? run.stride : columns.length * bytes;
    rows.outer = runs.stride;
    rows.run = rows.apart == bytes && runs.length == 1 ? 0 : run.length;
    return true;
}

// Whether an array can take results as rows, each element apart from the others: sorted, each step
// is over all that the shorter ones reach.
bool see_results(PyObject* object, const Call& c, Rows& rows) {
    if (!see_rows(object, c.axes, rows)) return false;
    if (!rows.run && rows.stride >= c.n * rows.apart) return true;
    Index run = rows.run ? rows.run : c.rows;
    std::array<std::pair<Index, Index>, 3> steps = {{{std::abs(rows.apart), c.n},
        {std::abs(rows.stride), run}, {std::abs(rows.outer), c.rows / run}}};
    std::sort(steps.begin(), steps.end());
    Index reach = BYTES[rows.type];
    for (auto [step, length] : steps) {
        if (length > 1 && step < reach) return false;
        reach += length > 1 ? step * (length - 1) : 0;
    }
    return true;
}

// True if an array does not overlap `other`: their ranges of addresses are disjoint. None overlaps
// nothing.
bool are_apart(PyArrayObject* a, PyObject* other) {
    if (!is_given(other)) return true;
    if (!PyArray_Check(other)) return false;
    PyArrayObject* both[] = {a, (PyArrayObject*)other};
    const char *first[2], *last[2];
    for (int i = 0; i < 2; i++) {
        first[i] = PyArray_BYTES(both[i]);
        last[i] = first[i] + PyArray_ITEMSIZE(both[i]);
        for (int k = 0; k < PyArray_NDIM(both[i]); k++) {
            Index way = (PyArray_DIM(both[i], k) - 1) * PyArray_STRIDE(both[i], k);
            (way < 0 ? first : last)[i] += way;
        }
    }
    return last[0] <= first[1] || last[1] <= first[0];
}

// Whether the user's array `out` has the shape of a result, and is apart from others.
bool can_take(PyObject* out, PyObject* like, std::initializer_list<PyObject*> others) {
    if (!PyArray_CheckExact(out) || !is_given(like)) return false;
    PyArrayObject* a = (PyArrayObject*)out;
    PyArrayObject* b = (PyArrayObject*)like;
    bool fits = PyArray_SAMESHAPE(a, b) && PyArray_ISWRITEABLE(a);
    for (PyObject* other : others) fits = fits && are_apart(a, other);
    return fits;
}

// ---- memory of large results, by NumPy's own interface for it ----

// Smaller results are as quick by NumPy's cache and malloc.
constexpr Index LARGE = 1 << 20;

void* handler_malloc(void*, size_t size) { return memory::take(size); }
void* handler_calloc(void*, size_t count, size_t size) {
    void* zeros = size && count > SIZE_MAX / size ? nullptr : memory::take(count * size);
    return zeros ? memset(zeros, 0, count * size) : nullptr;
}
void* handler_realloc(void*, void* old, size_t size) { return memory::grow(old, size); }
void handler_free(void*, void* old, size_t) { memory::give(old); }
PyDataMem_Handler handler = {
    "stablenorm", 1, {nullptr, handler_malloc, handler_calloc, handler_realloc, handler_free}};
PyObject* capsule;

// Tells the bytes that may be kept; called at the first large result, when a worker of Dask has set
// its own limit.
PyObject* default_limit;

bool set_limit(PyObject* value) {
    size_t limit = value ? PyLong_AsSize_t(value) : 0;
    if (PyErr_Occurred()) return false;
    Py_CLEAR(default_limit);
    memory::set_limit(limit);
    return true;
}

// Makes an array; a large one is in recycled memory, which its handler takes back when it goes.
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
    PyObject* array =
        PyArray_NewFromDescr(&PyArray_Type, descr, ndim, shape, nullptr, nullptr, 0, nullptr);
    if (large) {
        PyObject* ours = PyDataMem_SetHandler(before);
        Py_XDECREF(ours);
        Py_XDECREF(before);
    }
    return array;
}

// Returns the user's array for a result, or a new one like another.
PyObject* result_like(PyObject* out, PyArrayObject* like) {
    return is_given(out) ? Py_NewRef(out)
                         : new_array(PyArray_DESCR(like), PyArray_NDIM(like), PyArray_DIMS(like));
}

// Makes a vector of one number for each row or column.
template <class T> PyObject* new_vector(npy_intp count, int type, T*& data) {
    PyObject* made = PyArray_SimpleNew(1, &count, type);
    if (made) data = (T*)PyArray_DATA((PyArrayObject*)made);
    return made;
}

}  // namespace
