/* Tensors as Python hands them over: their attributes are read here, by name, so that a hook pays for no frame of Python and
 * for no conversion of arguments. Only where Python's headers were there when the library was built; torch's are never
 * needed. Whoever calls measures in another way what is left here. */

enum { MAX_TYPES = 4, MAX_DTYPES = 32 };

/* Below this many elements the GIL is kept, as in library.py. */
#define GIL_ELEMENTS 100000
/* From here on torch would be asked for its number of threads. */
#define WORTH_THREADS 800000
/* No storage has so many bytes: an address from here on is more than an offset into a storage that was freed. */
#define BEYOND_OFFSETS ((uint64_t)1 << 44)

static struct {
    PyObject *types[MAX_TYPES], *dtypes[MAX_DTYPES], *strided;
    int codes[MAX_DTYPES], num_types, num_dtypes, isa;
    PyObject *dtype, *is_cpu, *layout, *is_neg, *data_ptr, *numel, *is_contiguous;
} known;

typedef struct {
    uint64_t pointer;
    int64_t numel;
    uint8_t code;
} Dense;

static int is_attribute(PyObject *tensor, PyObject *name, PyObject *wanted)
{
    PyObject *value = PyObject_GetAttr(tensor, name);
    Py_XDECREF(value);
    return value == wanted;
}

static int is_answer(PyObject *tensor, PyObject *method, PyObject *wanted)
{
    PyObject *value = PyObject_CallMethodNoArgs(tensor, method);
    Py_XDECREF(value);
    return value == wanted;
}

/* Whether contiguous memory of the host holds what the tensor shows, and where; no exception is left. */
static int look_inside(PyObject *tensor, Dense *dense)
{
    int i = 0, code = -1;
    while (i < known.num_types && (PyObject *)Py_TYPE(tensor) != known.types[i]) i++;
    if (i == known.num_types) return 0;
    PyObject *dtype = PyObject_GetAttr(tensor, known.dtype);
    for (i = 0; i < known.num_dtypes && code < 0; i++)
        if (dtype == known.dtypes[i]) code = known.codes[i];
    Py_XDECREF(dtype);
    if (code < 0 || !is_attribute(tensor, known.is_cpu, Py_True) || !is_attribute(tensor, known.layout, known.strided)
        || !is_answer(tensor, known.is_neg, Py_False) || !is_answer(tensor, known.is_contiguous, Py_True))
        goto otherwise;
    PyObject *pointer = PyObject_CallMethodNoArgs(tensor, known.data_ptr);
    if (!pointer) goto otherwise;
    dense->pointer = PyLong_AsUnsignedLongLong(pointer);
    Py_DECREF(pointer);
    PyObject *numel = PyObject_CallMethodNoArgs(tensor, known.numel);
    if (!numel) goto otherwise;
    dense->numel = PyLong_AsLongLong(numel);
    Py_DECREF(numel);
    dense->code = (uint8_t)code;
    if (!PyErr_Occurred() && dense->pointer >= BEYOND_OFFSETS) return 1;
otherwise:
    PyErr_Clear();
    return 0;
}

/* measure_tensor(tensor, address, zero_eps, checksum) -> bool: the statistics are at the address, twelve words. False: it is
 * no plain dense tensor of the host, or worth several threads; nothing was written. */
static PyObject *measure_tensor(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    (void)self;
    if (num_args != 4) {
        PyErr_SetString(PyExc_TypeError, "measure_tensor: expected tensor, address, zero_eps, checksum");
        return NULL;
    }
    char *out = (char *)(uintptr_t)PyLong_AsUnsignedLongLong(args[1]);
    const double zero_eps = PyFloat_AsDouble(args[2]);
    const int32_t flags = args[3] == Py_True ? WITH_CHECKSUM : 0;
    Dense dense;
    if (PyErr_Occurred()) return NULL;
    if (!look_inside(args[0], &dense) || dense.numel >= WORTH_THREADS) Py_RETURN_FALSE;
    if (dense.numel < GIL_ELEMENTS) {
        sentinel_measure(1, &dense.pointer, &dense.numel, &dense.code, NULL, out, 0, zero_eps, flags, 1, known.isa);
    } else {
        Py_BEGIN_ALLOW_THREADS
        sentinel_measure(1, &dense.pointer, &dense.numel, &dense.code, NULL, out, 0, zero_eps, flags, 1, known.isa);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_TRUE;
}

/* measure_tensors(tensors, address, stride, zero_eps, checksum, num_threads) -> list: the statistics of tensor i are at
 * address + i * stride. The list has the numbers of those that are no plain dense tensors of the host; where those would be
 * stands nothing that counts. */
static PyObject *measure_tensors(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    (void)self;
    if (num_args != 6 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "measure_tensors: expected a list, address, stride, zero_eps, checksum, num_threads");
        return NULL;
    }
    char *out = (char *)(uintptr_t)PyLong_AsUnsignedLongLong(args[1]);
    const int64_t stride = PyLong_AsLongLong(args[2]);
    const double zero_eps = PyFloat_AsDouble(args[3]);
    const int32_t flags = args[4] == Py_True ? WITH_CHECKSUM : 0, num_threads = (int32_t)PyLong_AsLong(args[5]);
    if (PyErr_Occurred()) return NULL;
    /* What they are is asked of torch, which may let go of the GIL: nobody shall change the list meanwhile. */
    PyObject *tensors = PyList_AsTuple(args[0]), *left = PyList_New(0);
    const Py_ssize_t num = tensors ? PyTuple_GET_SIZE(tensors) : 0;
    uint64_t *pointers = PyMem_Malloc((size_t)(num + 1) * (sizeof *pointers + sizeof(int64_t) + 1));
    if (!tensors || !left || !pointers) goto failed;
    int64_t *numels = (int64_t *)(pointers + num), total = 0, bad = 0;
    uint8_t *codes = (uint8_t *)(numels + num);
    for (Py_ssize_t i = 0; i < num; i++) {
        Dense dense;
        if (!look_inside(PyTuple_GET_ITEM(tensors, i), &dense)) {
            dense = (Dense){0, 0, F32};
            PyObject *number = PyLong_FromSsize_t(i);
            const int is_kept = number && PyList_Append(left, number) == 0;
            Py_XDECREF(number);
            if (!is_kept) goto failed;
        }
        pointers[i] = dense.pointer;
        numels[i] = dense.numel;
        codes[i] = dense.code;
        total += dense.numel;
    }
    if (total < GIL_ELEMENTS) {
        bad = sentinel_measure(num, pointers, numels, codes, NULL, out, stride, zero_eps, flags, 1, known.isa);
    } else {
        Py_BEGIN_ALLOW_THREADS
        bad = sentinel_measure(num, pointers, numels, codes, NULL, out, stride, zero_eps, flags, num_threads, known.isa);
        Py_END_ALLOW_THREADS
    }
    if (bad) {
        PyErr_NoMemory();
        goto failed;
    }
    PyMem_Free(pointers);
    Py_DECREF(tensors);
    return left;
failed:
    PyMem_Free(pointers);
    Py_XDECREF(tensors);
    Py_XDECREF(left);
    return PyErr_Occurred() ? NULL : PyErr_NoMemory();
}

/* know_tensors(types, dtypes, strided, isa): the classes whose tensors are plain, the code of each dtype, torch.strided. */
static PyObject *know_tensors(PyObject *self, PyObject *args)
{
    PyObject *types, *dtypes, *strided, *dtype, *code;
    int isa;
    Py_ssize_t at = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!O!Oi", &PyTuple_Type, &types, &PyDict_Type, &dtypes, &strided, &isa)) return NULL;
    if (PyTuple_GET_SIZE(types) > MAX_TYPES || PyDict_Size(dtypes) > MAX_DTYPES) {
        PyErr_SetString(PyExc_ValueError, "know_tensors: too many types or dtypes");
        return NULL;
    }
    /* References are kept for ever: what is compared with them must not be freed. */
    known.num_types = known.num_dtypes = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types); i++)
        known.types[known.num_types++] = Py_NewRef(PyTuple_GET_ITEM(types, i));
    while (PyDict_Next(dtypes, &at, &dtype, &code)) {
        known.codes[known.num_dtypes] = (int)PyLong_AsLong(code);
        known.dtypes[known.num_dtypes++] = Py_NewRef(dtype);
    }
    known.strided = Py_NewRef(strided);
    known.isa = isa;
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}
