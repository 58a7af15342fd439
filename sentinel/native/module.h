/* The module that Python imports: functions that take Python's objects. All others are called through ctypes. */

static PyMethodDef methods[] = {
    {"know_tensors", know_tensors, METH_VARARGS, NULL},
    {"know_passing", know_passing, METH_VARARGS, NULL},
    {"measure_tensor", (PyCFunction)(void (*)(void))measure_tensor, METH_FASTCALL, NULL},
    {"measure_tensors", (PyCFunction)(void (*)(void))measure_tensors, METH_FASTCALL, NULL},
    {"take_again", (PyCFunction)(void (*)(void))take_again, METH_FASTCALL, NULL},
    {"take_gradient", (PyCFunction)(void (*)(void))take_gradient, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void)
{
    struct {
        PyObject **name;
        const char *text;
    } const names[] = {{&known.dtype, "dtype"}, {&known.is_cpu, "is_cpu"}, {&known.layout, "layout"},
                       {&known.is_neg, "is_neg"}, {&known.data_ptr, "data_ptr"}, {&known.numel, "numel"},
                       {&known.is_contiguous, "is_contiguous"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].name = PyUnicode_InternFromString(names[i].text))) return NULL;
    if (name_attributes()) return NULL;
    return PyModule_Create(&module);
}
