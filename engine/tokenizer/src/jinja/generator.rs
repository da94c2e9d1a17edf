//! Python's generators, which `select`, `map`, `batch` and others give.
//!
//! A generator is true whatever it yields, has no length and can be read once. The work
//! is done when the first item is asked for, by the interpreter.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use super::calls::CallArgs;
use super::value::Value;

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Step {
    Map,
    Select,
    Reject,
    SelectAttribute,
    RejectAttribute,
    Unique,
    Batch,
    Slice,
    Items,
    /// `reversed(…)`: an iterator, not a generator, with the same behaviour.
    Reverse,
}

pub(crate) struct Generator {
    pub(super) step: Step,
    pub(super) source: Value,
    pub(super) arguments: CallArgs,
    pub(super) started: Cell<bool>,
    /// What is left of the items, once started. Loops share it.
    pub(super) items: Rc<RefCell<VecDeque<Value>>>,
    pub(super) depth: u16,
}

impl Generator {
    pub(super) fn new(step: Step, source: Value, arguments: CallArgs) -> Self {
        let depth = arguments.depth().max(source.depth()) + 1;
        Self {
            step,
            source,
            arguments,
            started: Cell::new(false),
            items: Rc::default(),
            depth,
        }
    }
}
