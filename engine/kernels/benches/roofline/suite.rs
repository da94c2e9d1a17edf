//! The machine's limits, and a criterion whose throughput is a share of them.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use baton_kernels::{
    ComputeLimits, Isa, Kernels, LimitMeter, ReadLimit, Scratch, WeightMemory, read_rate_at,
};
use criterion::measurement::{Measurement, ValueFormatter, WallTime};
use criterion::{Criterion, SamplingMode, Throughput};

/// What each limit is measured for.
const LIMIT_BUDGET: Duration = Duration::from_millis(150);
const READ_SIZES_MIB: [usize; 5] = [1, 8, 32, 96, 256];

/// What a call has to do at least.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work {
    /// Operations by the arithmetic they are of; a multiply-add is two.
    pub int8_ops: f64,
    pub f32_ops: f64,
    /// Bytes that have to be moved, and the size of what they are a part of, call after call.
    pub bytes: f64,
    pub working_set: f64,
}

impl Work {
    /// Of `bytes` moved again and again.
    pub fn of_bytes(bytes: usize) -> Work {
        Work {
            bytes: bytes as f64,
            working_set: bytes as f64,
            ..Work::default()
        }
    }
}

/// Kernels, what they need, and where their times go.
pub struct Suite {
    pub kernels: Kernels,
    pub scratch: Scratch,
    pub memory: WeightMemory,
    compute: ComputeLimits,
    read: Vec<ReadLimit>,
    limit: Rc<Cell<Limit>>,
    criterion: Criterion<Clock>,
}

impl Suite {
    /// Measures the limits and prints them.
    pub fn new() -> Suite {
        let isa = variable("BATON_BENCH_ISA", Isa::detect(), |name| {
            Isa::from_name(name).ok()
        });
        let all = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = variable("BATON_BENCH_THREADS", all, |n| n.parse().ok());
        let kernels = Kernels::new(isa, threads).expect("threads of an instruction set there is");
        let meter = LimitMeter::new(isa, threads, &[], LIMIT_BUDGET).expect("as the kernels");
        let compute = meter.compute().expect("threads start");
        let sizes = READ_SIZES_MIB.map(|mib| mib << 20);
        let read = meter
            .read(&sizes)
            .expect("threads start and memory is there");
        println!(
            "{isa}, {threads} threads; int8 {:.0} Gop/s, f32 {:.0} Gop/s",
            compute.int8_ops_per_second / 1e9,
            compute.f32_ops_per_second / 1e9
        );
        for limit in &read {
            let rate = limit.bytes_per_second / 1e9;
            println!("read of {} MiB: {rate:.1} GB/s", limit.bytes >> 20);
        }
        let limit = Rc::new(Cell::new(Limit::default()));
        let criterion = Criterion::default()
            .with_measurement(Clock {
                shares: Shares(Rc::clone(&limit)),
            })
            .warm_up_time(Duration::from_millis(100))
            .measurement_time(Duration::from_millis(400))
            .sample_size(10)
            .nresamples(2000)
            .configure_from_args();
        Suite {
            kernels,
            scratch: Scratch::new(),
            memory: WeightMemory::new(),
            compute,
            read,
            limit,
            criterion,
        }
    }

    /// Times `call`, which does `work` each time.
    pub fn bench(
        &mut self,
        group: &str,
        name: &str,
        work: Work,
        mut call: impl FnMut(&Kernels, &mut Scratch),
    ) {
        self.limit.set(self.limit_of(work));
        let mut group = self.criterion.benchmark_group(group);
        // The formatter knows what it is of; without a throughput it would not be asked.
        group.throughput(Throughput::Elements(1));
        group.sampling_mode(SamplingMode::Flat);
        group.bench_function(name, |bencher| {
            bencher.iter(|| call(&self.kernels, &mut self.scratch));
        });
        group.finish();
    }

    pub fn finish(self) {
        self.criterion.final_summary();
    }

    fn limit_of(&self, work: Work) -> Limit {
        let arithmetic = work.int8_ops / self.compute.int8_ops_per_second
            + work.f32_ops / self.compute.f32_ops_per_second;
        let moving = if work.bytes > 0.0 {
            work.bytes / read_rate_at(&self.read, work.working_set)
        } else {
            0.0
        };
        if moving > arithmetic {
            return Limit {
                seconds: moving,
                amount: work.bytes,
                unit: "GB/s",
                name: "reading",
            };
        }
        Limit {
            seconds: arithmetic,
            amount: work.int8_ops + work.f32_ops,
            unit: "Gop/s",
            name: if work.f32_ops > 0.0 {
                "f32 peak"
            } else {
                "int8 peak"
            },
        }
    }
}

fn variable<T>(name: &str, default: T, read: impl Fn(&str) -> Option<T>) -> T {
    match std::env::var(name) {
        Ok(text) => read(&text).unwrap_or_else(|| panic!("{name} is `{text}`")),
        Err(_) => default,
    }
}

/// The limit that binds a benchmark.
#[derive(Clone, Copy, Default)]
struct Limit {
    /// The least a call takes.
    seconds: f64,
    amount: f64,
    unit: &'static str,
    name: &'static str,
}

/// Time by the wall or, for one thread on a machine that others use too, by its own processor time.
struct Clock {
    shares: Shares,
}

impl Measurement for Clock {
    type Intermediate = Duration;
    type Value = Duration;

    fn start(&self) -> Duration {
        now()
    }

    fn end(&self, start: Duration) -> Duration {
        now() - start
    }

    fn add(&self, a: &Duration, b: &Duration) -> Duration {
        *a + *b
    }

    fn zero(&self) -> Duration {
        Duration::ZERO
    }

    fn to_f64(&self, value: &Duration) -> f64 {
        value.as_nanos() as f64
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        &self.shares
    }
}

fn now() -> Duration {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    #[cfg(target_os = "linux")]
    {
        static CPU_TIME: LazyLock<bool> =
            LazyLock::new(|| std::env::var_os("BATON_BENCH_CPU_TIME").is_some());
        if *CPU_TIME {
            let mut time = libc::timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            // SAFETY: `time` is a `timespec` to write to.
            let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
            assert_eq!(failed, 0, "every thread has a clock of its own time");
            return Duration::new(time.tv_sec as u64, time.tv_nsec as u32);
        }
    }
    START.elapsed()
}

/// Times as criterion formats them, and for the throughput a rate and its share of the limit.
struct Shares(Rc<Cell<Limit>>);

impl ValueFormatter for Shares {
    fn format_throughput(&self, _: &Throughput, nanoseconds: f64) -> String {
        let limit = self.0.get();
        let rate = limit.amount / nanoseconds;
        let share = 100.0 * limit.seconds * 1e9 / nanoseconds;
        format!("{rate:.1} {} = {share:.0} % of {}", limit.unit, limit.name)
    }

    fn scale_values(&self, typical: f64, values: &mut [f64]) -> &'static str {
        WallTime.formatter().scale_values(typical, values)
    }

    fn scale_throughputs(&self, _: f64, _: &Throughput, values: &mut [f64]) -> &'static str {
        let limit = self.0.get();
        for value in values {
            *value = limit.amount / *value;
        }
        limit.unit
    }

    fn scale_for_machines(&self, values: &mut [f64]) -> &'static str {
        WallTime.formatter().scale_for_machines(values)
    }
}
