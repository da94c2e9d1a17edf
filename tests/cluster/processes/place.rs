//! A worker's place: it dies there and is started again, with the same flags and on the same
//! ports.

use baton_tests::process::{Launcher, Pool, Worker, free_port};

pub struct Place {
    pool: Pool,
    id: &'static str,
    control: u16,
    data: u16,
    flags: Vec<String>,
    worker: Option<Worker>,
}

impl Place {
    pub fn new(pool: Pool, id: &'static str, flags: &[&str]) -> Self {
        Self::at(pool, id, free_port(), free_port(), flags)
    }

    /// On these ports; a prefill worker has no use for the second one.
    pub fn at(pool: Pool, id: &'static str, control: u16, data: u16, flags: &[&str]) -> Self {
        Self {
            pool,
            id,
            control,
            data,
            flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
            worker: None,
        }
    }

    pub async fn start(&mut self, launcher: &Launcher) {
        let mut flags = self.flags.clone();
        flags.push(format!("--listen=127.0.0.1:{}", self.control));
        if self.pool == Pool::Decode {
            flags.push(format!("--data-listen=127.0.0.1:{}", self.data));
        }
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let worker = launcher.worker(self.pool, self.id, "rand", &flags).await;
        self.worker = Some(worker);
    }

    /// SIGKILL.
    pub async fn kill(&mut self) {
        let mut worker = self.worker.take().expect("it runs");
        worker.process.kill().await;
    }

    /// The next life takes KV at another port; the one of before.
    pub fn move_data(&mut self) -> u16 {
        std::mem::replace(&mut self.data, free_port())
    }

    pub fn worker(&self) -> &Worker {
        self.worker.as_ref().expect("it runs")
    }
}
