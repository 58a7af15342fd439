/* What a hook does at a site that has been seen before, without a frame of Python: take_again is the short way of
 * ModuleTap.take_inputs and take_outputs, take_gradient that of GradientTap. Between the layers of a small model nothing of
 * the interpreter is in the processor's caches any more, and each frame costs microseconds.
 *
 * Both look first, and leave to Python, with nothing changed, whatever is not as usual; then they do what ModuleTap._take and
 * GradientTap.take do, object by object, through the attributes of the same names. */

#define MAX_OWNED 32
#define ROW_OF(address) ((Row *)(uintptr_t)((address) - offsetof(Row, stats)))

#define FOR_EACH_NAME(X)                                                                                                     \
    X(_asks) X(_backward_hooks) X(_graph_task) X(_measures) X(_register_hook_dict) X(_version) X(address)                    \
    X(after_backward_hook) X(asked_twice) X(at) X(backward_micro_step) X(by_id) X(call_id) X(capacity) X(chunk) X(costs)     \
    X(cursor) X(depth) X(ended_steps) X(entry) X(flags) X(generation) X(grad) X(grad_fn) X(had_backward) X(handle)           \
    X(has_gradient) X(hook) X(hook_gradient) X(id) X(in_forward) X(inputs) X(is_alive) X(is_border) X(is_border_in)          \
    X(is_border_out) X(is_done) X(is_due) X(is_floating_point) X(is_measured) X(is_on) X(is_settled) X(kernel) X(kind)       \
    X(may_skip) X(measure) X(micro_step) X(module) X(names) X(num_rows) X(observe) X(observers) X(order) X(outputs)          \
    X(passes) X(recomputed) X(recorder) X(recording) X(requires_grad) X(row) X(rows) X(seen) X(site_pos) X(sites) X(step)    \
    X(survey) X(zero_eps)

#define AS_MEMBER(text) *text,
static struct {
    PyObject FOR_EACH_NAME(AS_MEMBER) *empty;
} name;

static struct {
    PyObject *tensor, *kernel, *sighting, *gradient_tap, *hooks, *keys, *is_grad_enabled, *graph_task, *guard, *border_word;
    int64_t border;
} passing;

/* References that end with the call. */
typedef struct {
    PyObject *refs[MAX_OWNED];
    int num;
} Owned;

static PyObject *keep(Owned *owned, PyObject *value)
{
    if (value) owned->refs[owned->num++] = value;
    return value;
}

static PyObject *let_go(Owned *owned, PyObject *value)
{
    while (owned->num) Py_DECREF(owned->refs[--owned->num]);
    return value;
}

/* An attribute; NULL with an exception, and where the object is NULL. */
static PyObject *part(Owned *owned, PyObject *of, PyObject *attribute)
{
    return of ? keep(owned, PyObject_GetAttr(of, attribute)) : NULL;
}

/* Whether an attribute is this very object; false with an exception, and where the object is NULL. */
static int is(PyObject *of, PyObject *attribute, PyObject *wanted)
{
    return of && is_attribute(of, attribute, wanted);
}

/* An integer attribute; -1 with an exception, and where the object is NULL. */
static int64_t number(PyObject *of, PyObject *attribute)
{
    PyObject *value = of ? PyObject_GetAttr(of, attribute) : NULL;
    const int64_t found = value ? PyLong_AsLongLong(value) : -1;
    Py_XDECREF(value);
    return found;
}

static int set_number(PyObject *of, PyObject *attribute, int64_t value)
{
    PyObject *boxed = PyLong_FromLongLong(value);
    const int failed = !boxed || PyObject_SetAttr(of, attribute, boxed);
    Py_XDECREF(boxed);
    return failed;
}

static int64_t graph_task(void)
{
    PyObject *task = PyObject_CallNoArgs(passing.graph_task);
    const int64_t found = task ? PyLong_AsLongLong(task) : -1;
    Py_XDECREF(task);
    return found;
}

/* As Sites.is_measured: 1 or 0; -1 with an exception. */
static int is_measured(PyObject *sites, PyObject *entry)
{
    const int64_t flags = number(entry, name.flags);
    if (flags == -1 && PyErr_Occurred()) return -1;
    if (flags & passing.border) return 1;
    if (!is(sites, name.is_due, Py_True)) return PyErr_Occurred() ? -1 : 0;
    PyObject *answer = PyObject_CallMethodOneArg(sites, name.is_measured, entry);
    const int found = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return found;
}

static int is_empty(PyObject *of, PyObject *attribute)
{
    PyObject *value = of ? PyObject_GetAttr(of, attribute) : NULL;
    const Py_ssize_t size = value ? PyObject_Size(value) : -1;
    Py_XDECREF(value);
    return size == 0;
}

static int measure_into(PyObject *recording, PyObject *rows, PyObject *tensor, int64_t row, Row *out)
{
    Owned owned = {.num = 0};
    Dense dense;
    PyObject *kernel = part(&owned, recording, name.kernel), *zero_eps = part(&owned, recording, name.zero_eps);
    if (!kernel || !zero_eps) {
        let_go(&owned, NULL);
        return -1;
    }
    if ((PyObject *)Py_TYPE(kernel) == passing.kernel && look_inside(tensor, &dense) && dense.numel < GIL_ELEMENTS) {
        sentinel_measure(1, &dense.pointer, &dense.numel, &dense.code, NULL, (char *)&out->stats, 0,
                         PyFloat_AsDouble(zero_eps), 0, 1, known.isa);
    } else {
        PyObject *lone = keep(&owned, PyTuple_Pack(1, tensor)), *at = keep(&owned, PyLong_FromLongLong(row));
        PyObject *method = part(&owned, kernel, name.measure), *keywords = keep(&owned, PyTuple_Pack(1, name.zero_eps));
        PyObject *args[] = {lone, rows, at, zero_eps};
        if (lone && at && method && keywords) keep(&owned, PyObject_Vectorcall(method, args, 3, keywords));
    }
    let_go(&owned, NULL);
    return PyErr_Occurred() ? -1 : 0;
}

/* As Recording.observe, of nobody but us: the row; -1 with an exception. */
static int64_t observe(PyObject *recording, PyObject *entry, PyObject *tensor, PyObject *micro_step)
{
    PyObject *rows = PyObject_GetAttr(recording, name.rows);
    int64_t row = number(rows, name.num_rows);
    const int64_t capacity = number(rows, name.capacity), call_id = number(recording, name.call_id);
    if (PyErr_Occurred()) goto failed;
    if (row >= capacity) {
        Py_CLEAR(rows);
        PyObject *found = PyObject_CallMethodObjArgs(recording, name.observe, entry, tensor, micro_step, NULL);
        row = found ? PyLong_AsLongLong(found) : -1;
        Py_XDECREF(found);
        return row;
    }
    Row head = {.num_folded = 1, .bad_call_id = NONE_ID, .max_call_id = NONE_ID, .bad_micro_step = -1, .max_micro_step = -1};
    head.tensor = (uint32_t)number(entry, name.id);
    head.kind = (uint8_t)number(entry, name.kind);
    head.flags = (uint16_t)number(entry, name.flags);
    head.site_pos = (uint32_t)number(entry, name.site_pos);
    head.micro_step = (int32_t)PyLong_AsLongLong(micro_step);
    head.call_id = (uint32_t)call_id;
    Row *out = ROW_OF(number(rows, name.address)) + row;
    if (PyErr_Occurred()) goto failed;
    memcpy(out, &head, offsetof(Row, stats));
    if (PyObject_SetAttr(recording, name.at, entry) || set_number(rows, name.num_rows, row + 1)
        || set_number(recording, name.call_id, call_id + 1) || measure_into(recording, rows, tensor, row, out))
        goto failed;
    Py_DECREF(rows);
    return row;
failed:
    Py_XDECREF(rows);
    return -1;
}

/* As Chunk.hook_gradient: the hook that waits for the gradient; NULL with an exception. */
static PyObject *hook_gradient(PyObject *chunk, PyObject *costs, PyObject *tensor, PyObject *grad, PyObject *micro_step)
{
    Owned owned = {.num = 0};
    PyObject *node = part(&owned, tensor, name.grad_fn), *join = NULL, *tap = NULL;
    if (node && node != Py_None && is(costs, name.is_on, Py_False)) {
        join = part(&owned, node, name._register_hook_dict);
        if (!join && PyErr_ExceptionMatches(PyExc_AttributeError)) PyErr_Clear();
    }
    if (PyErr_Occurred()) goto end;
    if (!join) {
        tap = PyObject_CallMethodObjArgs(chunk, name.hook_gradient, tensor, grad, NULL);
        goto end;
    }
    PyObject *hooks = part(&owned, tensor, name._backward_hooks);
    if (hooks == Py_None) {
        hooks = keep(&owned, PyObject_CallNoArgs(passing.hooks));
        if (!hooks || PyObject_SetAttr(tensor, name._backward_hooks, hooks)) goto end;
        if (!keep(&owned, PyObject_CallOneArg(join, tensor))) goto end;
    }
    PyObject *key = keep(&owned, PyIter_Next(passing.keys));
    tap = PyObject_CallFunctionObjArgs(passing.gradient_tap, chunk, grad, micro_step, NULL);
    if (!hooks || !key || !tap || PyObject_SetItem(hooks, key, tap)) Py_CLEAR(tap);
end:
    return let_go(&owned, tap);
}

/* take_again(tap, tensor, is_input, module) -> bool: a lone tensor passed where one was taken since the taps were changed, and
 * was taken again. False: nothing was done, for it is not such a tensor, or this forward has seen it before. module: whose
 * hook this is; None: the caller has asked whether the tap is to look at all. */
static PyObject *take_again(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    (void)self;
    if (num_args != 4) {
        PyErr_SetString(PyExc_TypeError, "take_again: expected tap, tensor, is_input, module");
        return NULL;
    }
    PyObject *tap = args[0], *tensor = args[1], *module = args[3], *sighting = NULL;
    const int is_input = args[2] == Py_True;
    if ((PyObject *)Py_TYPE(tensor) != passing.tensor) Py_RETURN_FALSE;
    Owned owned = {.num = 0};
    PyObject *chunk = part(&owned, tap, name.chunk), *recorder = part(&owned, chunk, name.recorder);
    PyObject *recording = part(&owned, recorder, name.recording), *costs = part(&owned, recording, name.costs);
    PyObject *sites = part(&owned, recorder, name.sites);
    if (!is(chunk, name.is_settled, Py_True)) goto otherwise;
    if (module != Py_None
        && !(is(tap, name.module, module) && is(recorder, name.is_alive, Py_True) && is(tap, name.may_skip, Py_False)
             && is(chunk, name.in_forward, Py_True) && graph_task() < 0))
        goto otherwise;
    PyObject *names = part(&owned, tap, name.names), *survey = part(&owned, chunk, name.survey);
    PyObject *entries = part(&owned, names, is_input ? name.inputs : name.outputs);
    PyObject *entry = entries ? keep(&owned, PyObject_GetItem(entries, name.empty)) : NULL;
    if (!entry && PyErr_ExceptionMatches(PyExc_KeyError)) PyErr_Clear();
    PyObject *direction = is_input ? Py_True : Py_False;
    PyObject *asked = part(&owned, tap, name._asks), *measured = part(&owned, tap, name._measures);
    asked = asked ? keep(&owned, PyObject_GetItem(asked, direction)) : NULL;
    measured = measured ? keep(&owned, PyObject_GetItem(measured, direction)) : NULL;
    PyObject *grad = part(&owned, entry, name.grad), *micro_step = part(&owned, chunk, name.micro_step);
    if (!asked || !measured || !grad || !micro_step || number(entry, name.generation) != number(survey, name.generation))
        goto otherwise;
    const int asks = PyObject_IsTrue(asked), measures = PyObject_IsTrue(measured);
    if ((asks && grad == Py_None) || !is_answer(tensor, name.is_floating_point, Py_True)) goto otherwise;
    PyObject *is_grad_enabled = keep(&owned, PyObject_CallNoArgs(passing.is_grad_enabled));
    PyObject *seen = part(&owned, part(&owned, chunk, name.seen), name.by_id), *key = keep(&owned, PyLong_FromVoidPtr(tensor));
    if (is_grad_enabled != Py_True || !seen || !key || PySequence_Contains(seen, key) || !is_empty(recording, name.observers))
        goto otherwise;
    const int is_row = measures ? is_measured(sites, entry) : 0;
    const int requires_grad = is(tensor, name.requires_grad, Py_True);
    const int is_hooked = asks && requires_grad ? is_measured(sites, grad) : 0;
    PyObject *is_border = part(&owned, tap, is_input ? name.is_border_in : name.is_border_out);
    PyObject *order = part(&owned, chunk, name.order), *position = part(&owned, entry, name.site_pos);
    if (!order || !position || !is_border || PyErr_Occurred()) goto otherwise;

    /* All is as usual: from here on only what fails in Python fails. */
    PyObject *of_sighting[] = {entry, is_border}, *keywords = passing.border_word;
    sighting = PyObject_Vectorcall(passing.sighting, of_sighting, 1, keywords);
    PyObject *reference = keep(&owned, PyWeakref_NewRef(tensor, NULL)), *version = part(&owned, tensor, name._version);
    PyObject *met = sighting && reference && version ? keep(&owned, PyTuple_Pack(3, reference, version, sighting)) : NULL;
    if (!met || PyObject_SetItem(seen, key, met) || PyObject_SetAttr(order, name.cursor, position)) goto failed;
    if (!is_input && requires_grad && PyObject_SetAttr(tap, name.has_gradient, Py_True)) goto failed;
    if (is_row) {
        const int64_t row = observe(recording, entry, tensor, micro_step);
        if (row < 0 || set_number(sighting, name.row, row)) goto failed;
    }
    if (asks && PyObject_SetAttr(grad, name.site_pos, position)) goto failed;
    if (is_hooked) {
        PyObject *hook = keep(&owned, hook_gradient(chunk, costs, tensor, grad, micro_step));
        if (!hook || PyObject_SetAttr(sighting, name.hook, hook)) goto failed;
    }
    Py_DECREF(sighting);
    let_go(&owned, NULL);
    Py_RETURN_TRUE;
otherwise:
    let_go(&owned, NULL);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_FALSE;
failed:
    Py_XDECREF(sighting);
    return let_go(&owned, NULL);
}

/* take_gradient(tap, gradient) -> bool: the gradient that a GradientTap waits for arrived, and was measured; False: nothing
 * was done, for something about it is to be looked at first. */
static PyObject *take_gradient(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    (void)self;
    if (num_args != 2) {
        PyErr_SetString(PyExc_TypeError, "take_gradient: expected tap, gradient");
        return NULL;
    }
    PyObject *tap = args[0], *gradient = args[1];
    if ((PyObject *)Py_TYPE(gradient) != passing.tensor) Py_RETURN_FALSE;
    Owned owned = {.num = 0};
    PyObject *chunk = part(&owned, tap, name.chunk), *recorder = part(&owned, chunk, name.recorder);
    PyObject *recording = part(&owned, recorder, name.recording), *sites = part(&owned, recorder, name.sites);
    PyObject *entry = part(&owned, tap, name.entry), *micro_step = part(&owned, tap, name.micro_step);
    PyObject *recomputed = part(&owned, chunk, name.recomputed);
    if (!is(tap, name.is_done, Py_False) || !is(tap, name.handle, Py_None) || !is(recorder, name.is_alive, Py_True)
        || number(tap, name.step) != number(recorder, name.ended_steps) || number(passing.guard, name.depth)
        || !is_empty(recomputed, name.asked_twice) || !is_empty(recording, name.observers) || !entry || !sites || !micro_step
        || PyErr_Occurred())
        goto otherwise;
    const int is_row = is_measured(sites, entry);
    if (is_row != 1) goto otherwise;
    if (PyObject_SetAttr(tap, name.is_done, Py_True) || PyObject_SetAttr(chunk, name.backward_micro_step, micro_step)
        || observe(recording, entry, gradient, micro_step) < 0)
        goto failed;
    /* Only the first gradient of a backward says anything new. */
    PyObject *passes = part(&owned, chunk, name.passes);
    if (!is(chunk, name.had_backward, Py_True) || graph_task() == -1 || graph_task() != number(passes, name._graph_task))
        if (!passes || !keep(&owned, PyObject_CallMethodOneArg(passes, name.after_backward_hook, chunk))) goto failed;
    if (PyErr_Occurred()) goto failed;
    let_go(&owned, NULL);
    Py_RETURN_TRUE;
otherwise:
    let_go(&owned, NULL);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_FALSE;
failed:
    return let_go(&owned, NULL);
}

/* know_passing(tensor, kernel, sighting, gradient_tap, hooks, keys, is_grad_enabled, graph_task, guard, border): see
 * native/tensors.py. */
static PyObject *know_passing(PyObject *self, PyObject *args)
{
    PyObject *found[9];
    long long border;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOOOOOOOL", &found[0], &found[1], &found[2], &found[3], &found[4], &found[5], &found[6],
                          &found[7], &found[8], &border))
        return NULL;
    PyObject **const places[] = {&passing.tensor, &passing.kernel, &passing.sighting, &passing.gradient_tap, &passing.hooks,
                                 &passing.keys, &passing.is_grad_enabled, &passing.graph_task, &passing.guard};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) Py_XSETREF(*places[i], Py_NewRef(found[i]));
    passing.border = border;
    Py_RETURN_NONE;
}

static int name_attributes(void)
{
#define INTERN(text) if (!(name.text = PyUnicode_InternFromString(#text))) return -1;
    FOR_EACH_NAME(INTERN)
    name.empty = PyUnicode_InternFromString("");
    passing.border_word = PyTuple_Pack(1, name.is_border);
    return name.empty && passing.border_word ? 0 : -1;
}
